"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.llama import SIZES
from mdsp.families.rope import read_rope, write_rope
from mdsp.families.windows import layer_types, read_layer_types
from mdsp.model.config import ModelConfig


def read_window(hf: HfConfig, options: dict[str, Any]) -> None:
    """`use_sliding_window`, and the window in the blocks from `max_window_layers` on (Qwen 2 and 3)."""
    used, window = hf.get("use_sliding_window", False), hf.get("sliding_window", 4096)
    first = hf.get("max_window_layers", 28)
    count = options["n_layers"]
    default = ["sliding_attention" if used and index >= first else "full_attention" for index in range(count)]
    read_layer_types(hf, options, window if used else None, default)
    read_rope(hf, options)


def write_window(config: ModelConfig, values: dict[str, Any]) -> None:
    """The same, to a file."""
    values["use_sliding_window"] = config.sliding_window is not None
    values["sliding_window"] = config.sliding_window
    values["max_window_layers"] = 0 if config.sliding_window is not None else config.n_layers
    values["layer_types"] = layer_types(config)
    write_rope(config, values)


FAMILY = replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    base_architectures=("Qwen2Model",),
    defaults={**LLAMA.defaults, "qkv_bias": True},
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("tie_word_embeddings", "tied_head", False),
    ),
    read=read_window,
    write=write_window,
)
