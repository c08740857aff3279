"""Llama 1, 2, 3, 3.1, 3.2 (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

from __future__ import annotations

from typing import Any

from mdsp.families.family import Family
from mdsp.families.fields import Field, HfConfig
from mdsp.families.rope import read_rope, write_rope
from mdsp.families.tensors import Module, module
from mdsp.model.config import ModelConfig

DEFAULTS: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "position": "rotary",
    "activation": "silu",
    "gated_mlp": True,
    "qkv_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "tied_head": False,
}
"""Options of Llama, from which the families after it differ in a few."""

SIZES: tuple[Field, ...] = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_size"),
    Field("num_hidden_layers", "n_layers"),
    Field("num_attention_heads", "n_heads"),
    Field("num_key_value_heads", "n_kv_heads", None),
    Field("head_dim", "head_dim", None),
    Field("max_position_embeddings", "max_positions"),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("initializer_range", "init_std", 0.02),
)
"""Fields that Llama and the families after it have in common."""

ATTENTION: tuple[Module, ...] = (
    module("self_attn.q_proj", "attention.query"),
    module("self_attn.k_proj", "attention.key"),
    module("self_attn.v_proj", "attention.value"),
    module("self_attn.o_proj", "attention.output"),
)
GATED_MLP: tuple[Module, ...] = (
    module("mlp.gate_proj", "mlp.gate"),
    module("mlp.up_proj", "mlp.up"),
    module("mlp.down_proj", "mlp.down"),
)
NORMS: tuple[Module, ...] = (
    module("input_layernorm", "attention_norm"),
    module("post_attention_layernorm", "mlp_norm"),
)
ROTARY_BUFFERS = (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",)


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    read_rope(hf, options)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    write_rope(config, values)


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    base_architectures=("LlamaModel",),
    defaults=DEFAULTS,
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Field("mlp_bias", "mlp_bias", False),
        Field("tie_word_embeddings", "tied_head", False),
    ),
    prefix="model.",
    embedding=(module("embed_tokens", "embedding"),),
    block_prefix="layers.{}.",
    block=(*NORMS, *ATTENTION, *GATED_MLP),
    final=(module("norm", "final_norm"),),
    head="lm_head",
    read=_read,
    write=_write,
    buffers=ROTARY_BUFFERS,
)
