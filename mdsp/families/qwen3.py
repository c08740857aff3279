"""Qwen 3 (Yang et al. 2025): Llama with an RMSNorm on every query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.llama import SIZES
from mdsp.families.qwen2 import read_window, write_window
from mdsp.families.tensors import module


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    options["head_dim"] = hf.get("head_dim", 128)  # the Hugging Face class does not derive it
    read_window(hf, options)


FAMILY = replace(
    LLAMA,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    base_architectures=("Qwen3Model",),
    defaults={**LLAMA.defaults, "qk_norm": "head"},
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Field("tie_word_embeddings", "tied_head", False),
    ),
    block=(
        *LLAMA.block,
        module("self_attn.q_norm", "attention.query_norm"),
        module("self_attn.k_norm", "attention.key_norm"),
    ),
    read=_read,
    write=write_window,
)
