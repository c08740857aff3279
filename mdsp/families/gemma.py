"""Gemma (Mesnard et al. 2024): embeddings times sqrt(hidden), norms that multiply by 1 + weight, gated tanh-GELU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.llama import SIZES
from mdsp.families.rope import read_rope, write_rope
from mdsp.model.config import ModelConfig


def embedding_scale(options: dict[str, Any]) -> dict[str, Any]:
    """The factor on the embeddings, sqrt(hidden size)."""
    hidden = options.get("hidden_size")
    return {"embedding_multiplier": float(hidden) ** 0.5} if isinstance(hidden, int) else {}


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    options |= embedding_scale(options)
    options["head_dim"] = hf.get("head_dim", 256)  # the Hugging Face class does not derive it
    # The first releases say "gelu" and mean the tanh form; `hidden_activation` is a later correction of that.
    hf.expect("hidden_act", "gelu", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    hf.expect("hidden_activation", "gelu_pytorch_tanh")
    hf.expect("use_bidirectional_attention", False)
    read_rope(hf, options)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    values["hidden_act"] = values["hidden_activation"] = "gelu_pytorch_tanh"
    write_rope(config, values)


FAMILY = replace(
    LLAMA,
    name="gemma",
    architecture="GemmaForCausalLM",
    base_architectures=("GemmaModel",),
    defaults={**LLAMA.defaults, "norm_unit_offset": True, "activation": "gelu_tanh", "tied_head": True},
    fields=(
        *SIZES,
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Field("tie_word_embeddings", "tied_head", True),
    ),
    read=_read,
    write=_write,
    derive=embedding_scale,
)
