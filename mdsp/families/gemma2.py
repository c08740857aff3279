"""Gemma 2 (Riviere et al. 2024): Gemma with norms on both sides, soft caps, and a window in every other block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.gemma import FAMILY as GEMMA
from mdsp.families.gemma import embedding_scale
from mdsp.families.llama import ATTENTION, GATED_MLP, SIZES
from mdsp.families.rope import read_rope, write_rope
from mdsp.families.tensors import module
from mdsp.families.windows import layer_types, read_layer_types
from mdsp.model.config import ModelConfig

_SOFTCAPS = {"attn_logit_softcapping": ("attention_softcap", 50.0), "final_logit_softcapping": ("logit_softcap", 30.0)}


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    options |= embedding_scale(options)
    options["head_dim"] = hf.get("head_dim", 256)  # the Hugging Face class does not derive it
    options["attention_scale"] = float(hf.get("query_pre_attn_scalar", 256)) ** -0.5
    for key, (option, default) in _SOFTCAPS.items():
        options[option] = hf.get(key) if key in hf.values else default
    hf.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    hf.expect("hidden_act", "gelu_pytorch_tanh")
    hf.expect("use_bidirectional_attention", False)
    hf.ignore("cache_implementation")
    count = options["n_layers"]
    every_other = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    read_layer_types(hf, options, hf.get("sliding_window", 4096), every_other)
    read_rope(hf, options)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
    scalar = scale**-2
    values["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
    for key, (option, _) in _SOFTCAPS.items():
        values[key] = getattr(config, option)
    values["hidden_activation"] = "gelu_pytorch_tanh"
    values["sliding_window"], values["layer_types"] = config.sliding_window, layer_types(config)
    write_rope(config, values)


FAMILY = replace(
    GEMMA,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    base_architectures=("Gemma2Model",),
    defaults={
        **GEMMA.defaults,
        "norm_placement": "sandwich",
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "sliding_window": 4096,
        "sliding_window_layers": "even",
    },
    fields=(
        *SIZES,
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Field("tie_word_embeddings", "tied_head", True),
    ),
    block=(
        module("input_layernorm", "attention_norm"),
        *ATTENTION,
        module("post_attention_layernorm", "attention_post_norm"),
        module("pre_feedforward_layernorm", "mlp_norm"),
        *GATED_MLP,
        module("post_feedforward_layernorm", "mlp_post_norm"),
    ),
    read=_read,
    write=_write,
    derive=embedding_scale,
)
