"""Named models have the sizes that their papers and Hugging Face print."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from mdsp.config.model_section import resolve_model
from mdsp.errors import ConfigError
from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table
from mdsp.plan.layout import model_sizes
from mdsp.plan.models import find_model, model_names, named_model

PUBLISHED = {
    # Counts printed by the models' own papers, cards or checkpoint indices, exact.
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592,
    "bloom-7b": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-72b": 72_706_203_648,
}
ROUNDED = {
    # Billions as Narayanan et al. 2021 (table 1) and Brown et al. 2020 (table 2.1) print them.
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18b": 18.4,
    "megatron-39b": 39.1,
    "megatron-76b": 76.1,
    "megatron-145b": 145.6,
    "megatron-310b": 310.1,
    "mt-nlg-530b": 529.6,
    "megatron-1t": 1008.0,
    "gpt3-175b": 174.6,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name: str) -> None:
    assert parameter_table(named_model(name)).numel == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_counts_round_to_the_printed_ones(name: str) -> None:
    assert round(parameter_table(named_model(name)).numel / 1e9, 1) == ROUNDED[name]


def _hf(name: str) -> transformers.PretrainedConfig:
    config = named_model(name)
    if config.family == "gpt2":
        return transformers.GPT2Config(
            n_layer=config.n_layers,
            n_embd=config.hidden_size,
            n_head=config.n_heads,
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
        )
    if config.family == "bloom":
        return transformers.BloomConfig(
            n_layer=config.n_layers, hidden_size=config.hidden_size, n_head=config.n_heads, vocab_size=config.vocab_size
        )
    return transformers.LlamaConfig(
        num_hidden_layers=config.n_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.ffn_size,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tied_head,
    )


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b", "bloom-176b", "llama3-405b", "llama3.2-1b"])
def test_counts_equal_transformers_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_hf(name))
    assert parameter_table(named_model(name)).numel == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", model_names())
def test_section_resolves_to_the_model(name: str) -> None:
    model = find_model(name)
    config, problems = resolve_model(model.section)
    assert not problems
    assert config == model.config


def test_a_bare_size_takes_the_nearest_shape_and_keeps_the_number() -> None:
    model = find_model("530B")
    assert model.config == named_model("mt-nlg-530b")
    assert model.parameters == 530e9


@pytest.mark.parametrize(
    ("text", "words"), [("llama3-80b", "near: "), ("30T", "too far off"), ("nothing.json", "cannot read")]
)
def test_unknown_models_are_refused_with_a_way_out(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_model(text)


def test_json_files_and_hf_directories(tmp_path: Path) -> None:
    transformers.LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=99).save_pretrained(
        tmp_path
    )
    assert find_model(str(tmp_path)).config.n_layers == 3
    assert find_model(str(tmp_path / "config.json")).config.vocab_size == 99
    (tmp_path / "run.json").write_text(
        '{"mdsp": {"model": {"family": "gpt2", "n_layers": 2, "hidden_size": 32, "n_heads": 4, "vocab_size": 50}}}'
    )
    assert find_model(str(tmp_path / "run.json")).config.hidden_size == 32


def test_stage_parameters_add_up_to_the_model() -> None:
    """Without padding and tensor parallelism, the stages hold each parameter once, a tied head twice."""
    tied = ModelConfig(n_layers=6, hidden_size=64, n_heads=4, vocab_size=256)
    for config, extra in ((tied, 256 * 64), (tied.model_copy(update={"tied_head": False}), 0)):
        sizes = model_sizes(config, 1)
        assert sizes.stage(0, (6,)) == sizes.total
        assert sum(sizes.stage(stage, (2, 2, 2)) for stage in range(3)) == sizes.total + extra
