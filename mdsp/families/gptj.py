"""GPT-J (Wang and Komatsuzaki 2021): parallel residual on one norm, interleaved rotary, a head with bias."""

from __future__ import annotations

from typing import Any

from mdsp.families.family import Family
from mdsp.families.fields import Field, HfConfig
from mdsp.families.tensors import module
from mdsp.model.config import ModelConfig


def _read(hf: HfConfig, options: dict[str, Any]) -> None:
    hf.expect("scale_attn_weights", True, default=True)
    hf.expect("rotary", True, default=True)
    if hf.get("tie_word_embeddings", False):
        raise hf.refuse("tie_word_embeddings", "a tied head with a bias is not supported for this family")
    hf.ignore("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    hf.ignore("summary_first_dropout")


def _write(config: ModelConfig, values: dict[str, Any]) -> None:
    values["tie_word_embeddings"] = False
    if config.ffn_size == 4 * config.hidden_size:
        values["n_inner"] = None


FAMILY = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    base_architectures=(),
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "residual": "parallel",
        "shared_norm": True,
        "position": "rotary",
        "rotary_interleaved": True,
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": True,
        "head_bias": True,
        "tied_head": False,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "max_positions", aliases=("max_position_embeddings",)),
        Field("n_embd", "hidden_size", aliases=("hidden_size",)),
        Field("n_layer", "n_layers", aliases=("num_hidden_layers",)),
        Field("n_head", "n_heads", aliases=("num_attention_heads",)),
        Field("n_inner", "ffn_size", None),
        Field("rotary_dim", "rotary_dim", None),
        Field("activation_function", "activation", "gelu_new"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("initializer_range", "init_std", 0.02),
        Field("embd_pdrop", "embedding_dropout", 0.0),
        Field("resid_pdrop", "hidden_dropout", 0.0),
        Field("attn_pdrop", "attention_dropout", 0.0),
    ),
    prefix="transformer.",
    embedding=(module("wte", "embedding"),),
    block_prefix="h.{}.",
    block=(
        module("ln_1", "attention_norm"),
        module("attn.q_proj", "attention.query"),
        module("attn.k_proj", "attention.key"),
        module("attn.v_proj", "attention.value"),
        module("attn.out_proj", "attention.output"),
        module("mlp.fc_in", "mlp.up"),
        module("mlp.fc_out", "mlp.down"),
    ),
    final=(module("ln_f", "final_norm"),),
    head="lm_head",
    read=_read,
    write=_write,
    buffers=(r"\.attn\.(bias|masked_bias|embed_positions)$",),
)
