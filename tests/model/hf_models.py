"""Small Hugging Face models with random weights, each with the ModelConfig that means the same.

The maps from Hugging Face names are written out here, independently of `mdsp.families`. Each is a mere renaming,
transposition or cutting, so that it serves for weights and for gradients alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Tensors = dict[str, Tensor]

SEQ = 12
"""Sequence length of all tests here: divisible by tensor-parallel degrees 2, 3 and 4."""


@dataclass(frozen=True)
class HfModel:
    """A kind of model: how to build it in `transformers`, and what it is called in mdsp."""

    name: str
    build: Callable[[], nn.Module]
    """The transformers model, with random weights."""
    fields: Mapping[str, Any]
    """`mdsp.model` of the JSON file."""
    to_table: Callable[[Mapping[str, Tensor]], Tensors]
    """Hugging Face tensors, by `named_parameters` name, to the parameter table's names."""


INTO_RESIDUAL = ("c_proj", "o_proj", "down_proj", "dense.", "dense_4h_to_h", "out_proj", "fc_out")


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Every parameter drawn anew, norms and biases too, with values at which each of them matters.

    Embeddings are large and projections into the residual small, as after training. With equal sizes the gradients of
    deep queries and keys are differences of nearly equal numbers, and rounding alone reaches 1e-5 of them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.3
            if parameter.ndim > 1:
                std = 0.5 if "embed" in name or ".wte" in name or ".wpe" in name else 0.15
                std = 0.1 if any(part in name for part in INTO_RESIDUAL) else std
            parameter.normal_(0.0, std, generator=generator)
            if "norm" in name.lower() or ".ln_" in name or "layer_norm" in name:
                parameter.add_(1.0 if name.endswith("weight") else 0.0)
    return model.eval()


def hf_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """ids [batch, seq] -> logits [batch, seq, vocabulary]."""
    return model(input_ids=ids, use_cache=False).logits


def causal_lm(config_class: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        # transformers gives the embedding of a padding token no gradient; here every token is text.
        config = getattr(transformers, config_class)(attn_implementation="eager", pad_token_id=None, **settings)
        return randomise(
            transformers.AutoModelForCausalLM.from_config(config), seed=len(config_class) + config.vocab_size
        )

    return build


def rename(hf: Mapping[str, Tensor], prefixes: Mapping[str, str], blocks: str, inner: Mapping[str, str]) -> Tensors:
    """Tensors `old.weight` and `old.bias` under new prefixes; those of blocks under `blocks.N.`."""
    out: Tensors = {}
    for name, tensor in hf.items():
        stem, kind = name.rsplit(".", 1)
        if stem in prefixes:
            out[f"{prefixes[stem]}.{kind}"] = tensor
        else:
            index, module = stem.removeprefix(f"{blocks}.").split(".", 1)
            out[f"blocks.{index}.{inner[module]}.{kind}"] = tensor
    return out


def cut(tensors: Tensors, fused: str, parts: Mapping[str, int]) -> Tensors:
    """Replace `...fused.weight` (and bias) by `parts` with the given numbers of rows."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        stem, kind = name.rsplit(".", 1)
        if stem.endswith(f".{fused}"):
            pieces = tensor.split(list(parts.values()))
            out.update(
                {f"{stem.removesuffix(fused)}{part}.{kind}": piece for part, piece in zip(parts, pieces, strict=True)}
            )
        else:
            out[name] = tensor
    return out


NO_DROPOUT = dict(embedding_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0)
# The options are spelt out rather than left to defaults of mdsp, which are not what is tested here.
GPT2_STYLE = dict(
    norm="layernorm", norm_bias=True, norm_eps=1e-5, position="learned", activation="gelu_tanh", gated_mlp=False,
    qkv_bias=True, attention_output_bias=True, mlp_bias=True, **NO_DROPOUT,
)  # fmt: skip
LLAMA_STYLE = dict(
    norm="rmsnorm", norm_eps=1e-5, position="rotary", activation="silu", gated_mlp=True, qkv_bias=False,
    attention_output_bias=False, mlp_bias=False, **NO_DROPOUT,
)  # fmt: skip

QKV = ("attention.query", "attention.key", "attention.value")
LLAMA_BLOCK = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
LLAMA_OUTER = {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "head"}


def _gpt2_tensors(hf: Mapping[str, Tensor]) -> Tensors:
    outer = {
        "transformer.wte": "embedding",
        "transformer.wpe": "position",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
    }
    inner = {
        "ln_1": "attention_norm",
        "attn.c_attn": "fused",
        "attn.c_proj": "attention.output",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    # GPT-2 keeps its projections as [in, out].
    straight = {name: tensor.t() if ".c_" in name and tensor.ndim == 2 else tensor for name, tensor in hf.items()}
    tensors = rename(straight, outer, "transformer.h", inner)
    hidden = tensors["embedding.weight"].shape[1]
    return cut(tensors, "fused", dict.fromkeys(QKV, hidden))


def _llama_tensors(hf: Mapping[str, Tensor]) -> Tensors:
    return rename(hf, LLAMA_OUTER, "model.layers", LLAMA_BLOCK)


def gpt2(name: str, vocab: int = 257, layers: int = 3, heads: int = 4, tied: bool = True) -> HfModel:
    """GPT-2: LayerNorm, learned positions, biases everywhere."""
    hidden = 8 * heads
    build = causal_lm(
        "GPT2Config", vocab_size=vocab, n_layer=layers, n_embd=hidden, n_head=heads, n_positions=SEQ + 3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied,
    )  # fmt: skip
    fields = dict(
        GPT2_STYLE, family="gpt2", n_layers=layers, hidden_size=hidden, n_heads=heads, vocab_size=vocab,
        max_positions=SEQ + 3, tied_head=tied,
    )  # fmt: skip
    return HfModel(name, build, fields, _gpt2_tensors)


def llama(
    name: str,
    kv_heads: int,
    vocab: int = 509,
    layers: int = 3,
    heads: int = 4,
    tied: bool = False,
    biases: bool = False,
) -> HfModel:
    """Llama: RMSNorm, rotary positions, gated MLP, grouped queries."""
    hidden, ffn = 8 * heads, 12 * heads
    build = causal_lm(
        "LlamaConfig", vocab_size=vocab, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, max_position_embeddings=SEQ + 3, tie_word_embeddings=tied,
        attention_bias=biases, mlp_bias=biases, rms_norm_eps=1e-5,
    )  # fmt: skip
    fields = dict(
        LLAMA_STYLE, family="llama", n_layers=layers, hidden_size=hidden, n_heads=heads, n_kv_heads=kv_heads,
        ffn_size=ffn, vocab_size=vocab, max_positions=SEQ + 3, tied_head=tied, qkv_bias=biases,
        attention_output_bias=biases, mlp_bias=biases,
    )  # fmt: skip
    return HfModel(name, build, fields, _llama_tensors)


def qwen3(name: str, kv_heads: int = 2) -> HfModel:
    """Qwen 3: an RMSNorm on every query and key head, one weight for all heads."""
    build = causal_lm(
        "Qwen3Config", vocab_size=131, num_hidden_layers=3, hidden_size=32, num_attention_heads=4, head_dim=8,
        num_key_value_heads=kv_heads, intermediate_size=48, max_position_embeddings=SEQ, tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    fields = dict(
        LLAMA_STYLE, family="qwen3", n_layers=3, hidden_size=32, n_heads=4, head_dim=8, n_kv_heads=kv_heads,
        ffn_size=48, vocab_size=131, max_positions=SEQ, qk_norm="head", tied_head=False,
    )  # fmt: skip
    return HfModel(name, build, fields, _llama_tensors)


def olmo2(name: str, kv_heads: int = 2) -> HfModel:
    """OLMo 2: an RMSNorm over all query (key) heads together, norms after attention and MLP."""
    build = causal_lm(
        "Olmo2Config", vocab_size=131, num_hidden_layers=3, hidden_size=32, num_attention_heads=4,
        num_key_value_heads=kv_heads, intermediate_size=48, max_position_embeddings=SEQ, tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    fields = dict(
        LLAMA_STYLE, family="olmo2", n_layers=3, hidden_size=32, n_heads=4, n_kv_heads=kv_heads, ffn_size=48,
        vocab_size=131, max_positions=SEQ, norm_placement="post", qk_norm="full", tied_head=False,
    )  # fmt: skip
    block = {
        **LLAMA_BLOCK,
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
    return HfModel(name, build, fields, lambda hf: rename(hf, LLAMA_OUTER, "model.layers", block))


def bloom(name: str) -> HfModel:
    """BLOOM: ALiBi, a norm after the embedding, queries, keys and values interleaved by head."""
    build = causal_lm(
        "BloomConfig", vocab_size=131, n_layer=3, hidden_size=32, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    fields = dict(
        {**GPT2_STYLE, "position": "alibi"}, family="bloom", n_layers=3, hidden_size=32, n_heads=4, vocab_size=131,
        max_positions=SEQ, embedding_norm=True, tied_head=True,
    )  # fmt: skip
    outer = {
        "transformer.word_embeddings": "embedding",
        "transformer.word_embeddings_layernorm": "embedding_norm",
        "transformer.ln_f": "final_norm",
    }
    inner = {
        "input_layernorm": "attention_norm",
        "self_attention.query_key_value": "fused",
        "self_attention.dense": "attention.output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    }

    def to_table(hf: Mapping[str, Tensor]) -> Tensors:
        tensors = rename(hf, outer, "transformer.h", inner)
        for key, tensor in tensors.items():
            if ".fused." in key:  # [heads, 3, head_dim, ...] -> [3, heads, head_dim, ...]
                tensors[key] = tensor.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2)
        return cut(tensors, "fused", dict.fromkeys(QKV, 32))

    return HfModel(name, build, fields, to_table)


def gptj(name: str) -> HfModel:
    """GPT-J: parallel residual with one shared norm, interleaved partial rotary positions, a bias on the head."""
    build = causal_lm(
        "GPTJConfig", vocab_size=131, n_layer=3, n_embd=32, n_head=4, n_positions=SEQ, rotary_dim=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    fields = dict(
        {**GPT2_STYLE, "position": "rotary", "qkv_bias": False, "attention_output_bias": False}, family="gptj",
        n_layers=3, hidden_size=32, n_heads=4, vocab_size=131, max_positions=SEQ, rotary_dim=4, rotary_interleaved=True,
        residual="parallel", shared_norm=True, tied_head=False, head_bias=True,
    )  # fmt: skip
    outer = {"transformer.wte": "embedding", "transformer.ln_f": "final_norm", "lm_head": "head"}
    inner = {
        "ln_1": "attention_norm",
        "attn.q_proj": "attention.query",
        "attn.k_proj": "attention.key",
        "attn.v_proj": "attention.value",
        "attn.out_proj": "attention.output",
        "mlp.fc_in": "mlp.up",
        "mlp.fc_out": "mlp.down",
    }
    return HfModel(name, build, fields, lambda hf: rename(hf, outer, "transformer.h", inner))


def gemma2(name: str) -> HfModel:
    """Gemma 2: sandwich norms with unit offset, soft caps, a window on every other block, scaled embeddings."""
    build = causal_lm(
        "Gemma2Config", vocab_size=131, num_hidden_layers=3, hidden_size=32, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=SEQ, sliding_window=5,
        query_pre_attn_scalar=12, rms_norm_eps=1e-5, attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
    )  # fmt: skip
    fields = dict(
        {**LLAMA_STYLE, "activation": "gelu_tanh"}, family="gemma2", n_layers=3, hidden_size=32, n_heads=4, head_dim=8,
        n_kv_heads=2, ffn_size=48, vocab_size=131, max_positions=SEQ, norm_unit_offset=True, norm_placement="sandwich",
        sliding_window=5, sliding_window_layers="even", attention_scale=12**-0.5, attention_softcap=3.0,
        logit_softcap=4.0, embedding_multiplier=32**0.5, tied_head=True,
    )  # fmt: skip
    block = {
        **LLAMA_BLOCK,
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
    return HfModel(name, build, fields, lambda hf: rename(hf, LLAMA_OUTER, "model.layers", block))
