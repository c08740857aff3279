"""OPT (Zhang et al. 2022): learned positions that start at row 2, ReLU, pre-norm (the post-norm 350m is refused)."""

from __future__ import annotations

from typing import Any

from mdsp.families.family import Family
from mdsp.families.fields import Field, HfConfig
from mdsp.families.llama import ATTENTION
from mdsp.families.tensors import Module, module
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    hf.expect("do_layer_norm_before", True, default=True)
    hf.expect("_remove_final_layer_norm", False)
    hf.expect("layer_norm_elementwise_affine", True, default=True)
    hf.expect("layerdrop", 0, 0.0)
    hf.expect("word_embed_proj_dim", options["hidden_size"])
    hf.ignore("activation_dropout")  # not read by the model


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    values |= {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layerdrop": 0.0}
    values |= {"layer_norm_elementwise_affine": True, "word_embed_proj_dim": config.hidden_size}


def _attention(entry: Module) -> Module:
    return module(entry.hf.replace("o_proj", "out_proj"), *entry.parameters)


FAMILY = Family(
    name="opt",
    architecture="OPTForCausalLM",
    base_architectures=("OPTModel",),
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position": "learned",
        "position_offset": 2,
        "activation": "relu",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_head": True,
        "hidden_dropout": 0.1,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "hidden_size"),
        Field("num_hidden_layers", "n_layers"),
        Field("num_attention_heads", "n_heads"),
        Field("ffn_dim", "ffn_size"),
        Field("max_position_embeddings", "max_positions"),
        Field("activation_function", "activation", "relu"),
        Field("enable_bias", ("qkv_bias", "attention_output_bias", "mlp_bias"), True),
        Field("tie_word_embeddings", "tied_head", True),
        Field("dropout", "hidden_dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("init_std", "init_std", 0.02),
    ),
    prefix="model.",
    embedding=(module("decoder.embed_tokens", "embedding"), module("decoder.embed_positions", "position")),
    block_prefix="decoder.layers.{}.",
    block=(
        module("self_attn_layer_norm", "attention_norm"),
        *(_attention(entry) for entry in ATTENTION),
        module("final_layer_norm", "mlp_norm"),
        module("fc1", "mlp.up"),
        module("fc2", "mlp.down"),
    ),
    final=(module("decoder.final_layer_norm", "final_norm"),),
    head="lm_head",
    read=_read,
    write=_write,
    buffers=(r"decoder\.version$",),
    activation_name="gelu_new",
)
