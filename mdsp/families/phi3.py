"""Phi-3 and Phi-4 mini (Abdin et al. 2024): Llama with fused query|key|value and gate|up; LongRoPE is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.llama import NORMS, SIZES
from mdsp.families.rope import read_rope, write_rope
from mdsp.families.tensors import module
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    read_rope(hf, options, kinds=())
    # The first matters to LongRoPE only; the model does not apply the second.
    hf.ignore("original_max_position_embeddings", "embd_pdrop")
    hf.expect("attention_bias", False)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    write_rope(config, values, fraction_always=True)
    values["original_max_position_embeddings"] = config.max_positions


FAMILY = replace(
    LLAMA,
    name="phi3",
    architecture="Phi3ForCausalLM",
    base_architectures=("Phi3Model",),
    defaults={**LLAMA.defaults, "norm_eps": 1e-5},
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tied_head", False),
        Field("sliding_window", "sliding_window", None),
        Field("resid_pdrop", "hidden_dropout", 0.0),
    ),
    block=(
        *NORMS,
        module("self_attn.qkv_proj", "attention.query", "attention.key", "attention.value"),
        module("self_attn.o_proj", "attention.output"),
        module("mlp.gate_up_proj", "mlp.gate", "mlp.up"),
        module("mlp.down_proj", "mlp.down"),
    ),
    read=_read,
    write=_write,
)
