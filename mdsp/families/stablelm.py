"""StableLM 2 (Bellagente et al. 2024): LayerNorm, a quarter of each head rotated, optionally one shared norm.

Per-head LayerNorm on queries and keys (`qk_layernorm`, the 12B model) is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.llama import SIZES
from mdsp.families.rope import quarter_rotary, read_rope, write_rope
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    hf.expect("qk_layernorm", False)
    hf.expect("hidden_dropout", 0, 0.0)  # it would act on the MLP branch only
    parallel = hf.get("use_parallel_residual", False)
    options |= {"residual": "parallel" if parallel else "sequential", "shared_norm": parallel}
    read_rope(hf, options, fraction=0.25)


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    values["use_parallel_residual"] = config.residual == "parallel"
    values["qk_layernorm"] = False
    write_rope(config, values, fraction_always=True)


FAMILY = replace(
    LLAMA,
    name="stablelm",
    architecture="StableLmForCausalLM",
    base_architectures=("StableLmModel",),
    defaults={**LLAMA.defaults, "norm": "layernorm", "norm_eps": 1e-5},
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("use_qkv_bias", "qkv_bias", False),
        Field("tie_word_embeddings", "tied_head", False),
    ),
    read=_read,
    write=_write,
    derive=quarter_rotary,
)
