"""StarCoder 2 (Lozhkov et al. 2024): LayerNorm, rotary, a plain MLP, biases everywhere, optionally a sliding window."""

from __future__ import annotations

from dataclasses import replace

from mdsp.families.fields import Field
from mdsp.families.llama import ATTENTION, NORMS, SIZES
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.tensors import module

FAMILY = replace(
    LLAMA,
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    base_architectures=("Starcoder2Model",),
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position": "rotary",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_head": True,
        "init_std": 0.018042,
    },
    fields=(
        *SIZES[:-1],
        Field("initializer_range", "init_std", 0.018042),
        Field("hidden_act", "activation", "gelu_pytorch_tanh"),
        Field("norm_epsilon", "norm_eps", 1e-5),
        Field("use_bias", ("qkv_bias", "attention_output_bias", "mlp_bias"), True),
        Field("tie_word_embeddings", "tied_head", True),
        Field("sliding_window", "sliding_window", None),
        Field("embedding_dropout", "embedding_dropout", 0.0),
        Field("residual_dropout", "hidden_dropout", 0.0),
    ),
    block=(*NORMS, *ATTENTION, module("mlp.c_fc", "mlp.up"), module("mlp.c_proj", "mlp.down")),
    activation_name="gelu_pytorch_tanh",
)
