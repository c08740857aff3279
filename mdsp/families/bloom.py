"""BLOOM (Scao et al. 2022): ALiBi, a norm after the embedding, query|key|value fused per head."""

from __future__ import annotations

from typing import Any

from mdsp.families.family import Family
from mdsp.families.fields import Field, HfConfig
from mdsp.families.tensors import module
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    hf.expect("apply_residual_connection_post_layernorm", False)
    hf.expect("n_inner", 4 * options["hidden_size"])
    length = hf.get("seq_length")
    if length is not None:  # ALiBi has no longest sequence; old files say which one was trained
        options["max_positions"] = length
    hf.ignore("slow_but_exact", "offset_alibi", "attention_softmax_in_fp32", "masked_softmax_fusion")
    hf.ignore("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "use_fast_qkv", "embed_layer_norm")


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    values["apply_residual_connection_post_layernorm"] = False
    values["seq_length"] = config.max_positions


FAMILY = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    base_architectures=("BloomModel",),
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "embedding_norm": True,
        "position": "alibi",
        "max_positions": 2048,
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_head": True,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "hidden_size", aliases=("n_embed",)),
        Field("n_layer", "n_layers", aliases=("num_hidden_layers",)),
        Field("n_head", "n_heads", aliases=("num_attention_heads",)),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tied_head", True),
        Field("hidden_dropout", "hidden_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("initializer_range", "init_std", 0.02),
    ),
    prefix="transformer.",
    embedding=(module("word_embeddings", "embedding"), module("word_embeddings_layernorm", "embedding_norm")),
    block_prefix="h.{}.",
    block=(
        module("input_layernorm", "attention_norm"),
        module("self_attention.query_key_value", "attention.query", "attention.key", "attention.value", per_head=True),
        module("self_attention.dense", "attention.output"),
        module("post_attention_layernorm", "mlp_norm"),
        module("mlp.dense_h_to_4h", "mlp.up"),
        module("mlp.dense_4h_to_h", "mlp.down"),
    ),
    final=(module("ln_f", "final_norm"),),
    head="lm_head",
    read=_read,
    write=_write,
)
