"""`config.json` in both directions, against the configuration classes of `transformers`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from mdsp.errors import ConfigError
from mdsp.families import family_names, get_family, model_config_from_hf
from tests.families.models import CASES, make_model

SMALL: dict[str, Any] = {"n_layers": 2, "hidden_size": 32, "n_heads": 4, "vocab_size": 99, "max_positions": 64}

# What the two directions may differ in: bookkeeping, and names under which older versions know the same thing.
BOOKKEEPING = {"_name_or_path", "transformers_version", "architectures", "dtype", "_attn_implementation_internal"}


def _fields(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in BOOKKEEPING}


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_was_read(case: str) -> None:
    """transformers -> mdsp -> transformers: every field of the class has its value again."""
    original = make_model(case).config
    family = get_family(CASES[case][0])
    model = family.config_from_hf(json.loads(original.to_json_string(use_diff=False)))
    written = transformers.AutoConfig.for_model(
        **{**family.config_to_hf(model), "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    )
    expected, got = _fields(original), _fields(written)
    harmless = {"seq_length", "hidden_activation", "original_max_position_embeddings", "max_window_layers"}
    for key in expected.keys() - harmless:
        if key == "rope_parameters":  # the defaults of a scaling are spelled out
            got[key] = {name: value for name, value in got[key].items() if name in expected[key]}
        if isinstance(expected[key], float):
            assert got[key] == pytest.approx(expected[key]), key
        else:
            assert got[key] == expected[key], key


@pytest.mark.parametrize("name", family_names())
def test_defaults_make_a_model_that_transformers_can_build(name: str) -> None:
    """{"family": name, sizes} alone: its export describes exactly the tensors that the family maps."""
    family = get_family(name)
    model = family.model_config(SMALL)
    values = family.config_to_hf(model) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    mapped = sum(piece.parameter.numel for entry in family.tensors(model) for piece in entry.pieces)
    assert mapped == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", family_names())
def test_old_and_new_rotary_fields_mean_the_same(name: str) -> None:
    family = get_family(name)
    model = family.model_config({**SMALL, "rotary_base": 777.0} if family.defaults["position"] == "rotary" else SMALL)
    if family.defaults["position"] != "rotary" or name == "gptj":
        return
    values = family.config_to_hf(model)
    del values["rope_parameters"]  # what transformers 4 wrote
    assert family.config_to_hf(family.config_from_hf(values)) == family.config_to_hf(model)


def test_an_option_that_a_family_cannot_express_is_refused() -> None:
    llama = get_family("llama")
    for option in ({"norm": "layernorm"}, {"logit_softcap": 3.0}, {"sliding_window": 5}, {"residual": "parallel"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            llama.config_to_hf(llama.model_config({**SMALL, **option}))


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama"):
        get_family("lama")
    with pytest.raises(ConfigError, match="No such file"):
        model_config_from_hf(tmp_path)
    for text, named in (("{", "JSON"), ("[]", "object"), ("{}", "model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=named):
            model_config_from_hf(tmp_path)


def test_published_configurations_are_read() -> None:
    """Fields as in files on the Hub, written by older versions of `transformers`."""
    pythia = {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 512,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    }
    assert get_family("gpt_neox").config_from_hf(pythia).rotary_dim == 16
    llama31 = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    config = get_family("llama").config_from_hf(llama31)
    assert config.rope_scaling is not None and config.rope_scaling.original_max_positions == 8192
    assert config.rotary_base == 500000.0 and config.n_kv_heads == 8
    gpt2 = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    assert get_family("gpt2").config_from_hf(gpt2).tied_head


def test_families_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mdsp.families as f; [f.get_family(n) for n in f.family_names()]; "
        "assert not {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
