"""OLMo 2 (Walsh et al. 2025): norms after attention and MLP, and over all query and all key heads together."""

from __future__ import annotations

from dataclasses import replace

from mdsp.families.fields import Field
from mdsp.families.llama import ATTENTION, GATED_MLP, SIZES
from mdsp.families.llama import FAMILY as LLAMA
from mdsp.families.tensors import module

FAMILY = replace(
    LLAMA,
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    base_architectures=("Olmo2Model",),
    defaults={**LLAMA.defaults, "norm_eps": 1e-5, "norm_placement": "post", "qk_norm": "full"},
    fields=(
        *SIZES,
        Field("hidden_act", "activation", "silu"),
        Field("rms_norm_eps", "norm_eps", 1e-5),
        Field("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        Field("tie_word_embeddings", "tied_head", False),
    ),
    block=(
        *ATTENTION,
        module("self_attn.q_norm", "attention.query_norm"),
        module("self_attn.k_norm", "attention.key_norm"),
        module("post_attention_layernorm", "attention_post_norm"),
        *GATED_MLP,
        module("post_feedforward_layernorm", "mlp_post_norm"),
    ),
)
