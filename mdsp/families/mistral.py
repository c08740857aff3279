"""Mistral (Jiang et al. 2023): Llama with a sliding window in every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.llama import SIZES
from mdsp.families.rope import read_rope


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    # Absent means 4096 to the Hugging Face class, null means none: the two differ.
    options["sliding_window"] = hf.get("sliding_window") if "sliding_window" in hf.values else 4096
    if hf.has("layer_types"):
        raise hf.refuse("layer_types", "kinds of attention per block are not supported for this family")
    read_rope(hf, options)


FAMILY = replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    base_architectures=("MistralModel",),
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("tie_word_embeddings", "tied_head", False),
        Field("sliding_window", "sliding_window", None),
    ),
    read=_read,
)
