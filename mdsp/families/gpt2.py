"""GPT-2 (Radford et al. 2019): learned positions, fused query|key|value, matrices stored `[in, out]`."""

from __future__ import annotations

from typing import Any

from mdsp.families.family import Family
from mdsp.families.fields import Field, HfConfig
from mdsp.families.tensors import module
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    hf.expect("scale_attn_weights", True, default=True)
    hf.expect("scale_attn_by_inverse_layer_idx", False)
    # n_ctx repeats n_positions; upcasting and reordering change rounding in half precision only.
    hf.ignore("n_ctx", "reorder_and_upcast_attn")
    hf.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    hf.ignore("summary_first_dropout")


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    if config.ffn_size == 4 * config.hidden_size:
        values["n_inner"] = None


FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    base_architectures=("GPT2Model",),
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position": "learned",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_head": True,
        "embedding_dropout": 0.1,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "max_positions", aliases=("max_position_embeddings",)),
        Field("n_embd", "hidden_size", aliases=("hidden_size",)),
        Field("n_layer", "n_layers", aliases=("num_hidden_layers",)),
        Field("n_head", "n_heads", aliases=("num_attention_heads",)),
        Field("n_inner", "ffn_size", None),
        Field("activation_function", "activation", "gelu_new"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("initializer_range", "init_std", 0.02),
        Field("tie_word_embeddings", "tied_head", True),
        Field("embd_pdrop", "embedding_dropout", 0.1),
        Field("resid_pdrop", "hidden_dropout", 0.1),
        Field("attn_pdrop", "attention_dropout", 0.1),
    ),
    prefix="transformer.",
    embedding=(module("wte", "embedding"), module("wpe", "position")),
    block_prefix="h.{}.",
    block=(
        module("ln_1", "attention_norm"),
        module("attn.c_attn", "attention.query", "attention.key", "attention.value", transposed=True),
        module("attn.c_proj", "attention.output", transposed=True),
        module("ln_2", "mlp_norm"),
        module("mlp.c_fc", "mlp.up", transposed=True),
        module("mlp.c_proj", "mlp.down", transposed=True),
    ),
    final=(module("ln_f", "final_norm"),),
    head="lm_head",
    read=_read,
    write=_write,
    buffers=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
)
