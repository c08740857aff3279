"""GPT-NeoX and Pythia (Black et al. 2022): parallel residual, partial rotary, query|key|value fused per head."""

from __future__ import annotations

from typing import Any

from mdsp.families.family import Family
from mdsp.families.fields import Field, HfConfig
from mdsp.families.rope import quarter_rotary, read_rope, write_rope
from mdsp.families.tensors import module
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    options["residual"] = "parallel" if hf.get("use_parallel_residual", True) else "sequential"
    read_rope(hf, options, theta_key="rotary_emb_base", fraction_key="rotary_pct", fraction=0.25)
    hf.expect("attention_probs_dropout_prob", 0)
    hf.expect("hidden_dropout_prob", 0)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    values["use_parallel_residual"] = config.residual == "parallel"
    write_rope(config, values, fraction_always=True)
    # Before version 5, `transformers` knew these two under names of this family.
    values["rotary_emb_base"], values["rotary_pct"] = values.pop("rope_theta"), values.pop("partial_rotary_factor")


FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base_architectures=("GPTNeoXModel",),
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "residual": "parallel",
        "position": "rotary",
        "activation": "gelu",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_head": False,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "hidden_size"),
        Field("num_hidden_layers", "n_layers"),
        Field("num_attention_heads", "n_heads"),
        Field("intermediate_size", "ffn_size"),
        Field("max_position_embeddings", "max_positions"),
        Field("hidden_act", "activation", "gelu"),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), True),
        Field("tie_word_embeddings", "tied_head", False),
        Field("hidden_dropout", ("hidden_dropout", "embedding_dropout"), 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("initializer_range", "init_std", 0.02),
    ),
    prefix="gpt_neox.",
    embedding=(module("embed_in", "embedding"),),
    block_prefix="layers.{}.",
    block=(
        module("input_layernorm", "attention_norm"),
        module("attention.query_key_value", "attention.query", "attention.key", "attention.value", per_head=True),
        module("attention.dense", "attention.output"),
        module("post_attention_layernorm", "mlp_norm"),
        module("mlp.dense_h_to_4h", "mlp.up"),
        module("mlp.dense_4h_to_h", "mlp.down"),
    ),
    final=(module("final_layer_norm", "final_norm"),),
    head="embed_out",
    read=_read,
    write=_write,
    buffers=(r"\.attention\.(bias|masked_bias)$", r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$"),
    derive=quarter_rotary,
)
