"""Granite 3 (IBM 2024): Llama with four multipliers: embeddings, residual branches, attention scores, logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.rope import read_rope, write_rope
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    options["attention_scale"] = float(hf.get("attention_multiplier", 1.0))
    options["logit_multiplier"] = 1.0 / hf.get("logits_scaling", 1.0)
    read_rope(hf, options)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
    values["attention_multiplier"] = scale
    values["logits_scaling"] = 1.0 / config.logit_multiplier
    write_rope(config, values)


FAMILY = replace(
    LLAMA,
    name="granite",
    architecture="GraniteForCausalLM",
    base_architectures=("GraniteModel",),
    fields=(
        *LLAMA.fields,
        Field("embedding_multiplier", "embedding_multiplier", 1.0),
        Field("residual_multiplier", "residual_multiplier", 1.0),
    ),
    read=_read,
    write=_write,
)
