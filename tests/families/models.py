"""Tiny random models of every family, made by `transformers`, in several shapes. Nothing in them is zero or one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

VOCAB = 99  # odd, so that no tensor-parallel degree divides it

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
)
_OLD_NAMES: dict[str, Any] = dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64)
_NO_TOKENS: dict[str, Any] = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
_OPT: dict[str, Any] = {**{key: value for key, value in _SIZES.items() if key != "intermediate_size"}, "ffn_dim": 48}
_GQA: dict[str, Any] = dict(_SIZES, num_key_value_heads=2)
_MQA: dict[str, Any] = dict(_SIZES, num_key_value_heads=1)
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
_LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _OLD_NAMES),
    "gpt2-untied": ("gpt2", dict(_OLD_NAMES, tie_word_embeddings=False, n_inner=40, activation_function="gelu")),
    "gpt_neox": ("gpt_neox", _SIZES),
    "gpt_neox-sequential": (
        "gpt_neox",
        dict(
            _SIZES,
            use_parallel_residual=False,
            tie_word_embeddings=True,
            hidden_act="gelu_new",
            rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5),
        ),
    ),
    "gptj": ("gptj", dict(_OLD_NAMES, rotary_dim=4)),
    "gptj-full": ("gptj", dict(_OLD_NAMES, rotary_dim=8)),
    "opt": ("opt", _OPT),
    "opt-nobias": ("opt", dict(_OPT, enable_bias=False, tie_word_embeddings=False)),
    "bloom": ("bloom", dict(vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4)),
    "bloom-heads": ("bloom", dict(vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=12, tie_word_embeddings=False)),
    "llama": ("llama", _GQA),
    "llama-mqa-bias": ("llama", dict(_MQA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12)),
    "llama-llama3": ("llama", dict(_GQA, rope_parameters=_LLAMA3)),
    "llama-yarn": ("llama", dict(_GQA, rope_parameters=_YARN)),
    "llama-linear": ("llama", dict(_SIZES, rope_parameters=_LINEAR)),
    "mistral": ("mistral", dict(_GQA, sliding_window=7, head_dim=8)),
    "mistral-nowindow": ("mistral", dict(_MQA, sliding_window=None)),
    "qwen2": ("qwen2", _GQA),
    "qwen2-window": (
        "qwen2",
        dict(_MQA, use_sliding_window=True, sliding_window=7, max_window_layers=0, tie_word_embeddings=True),
    ),
    "qwen3": ("qwen3", dict(_GQA, head_dim=16)),
    "qwen3-tied": ("qwen3", dict(_MQA, head_dim=8, tie_word_embeddings=True, attention_bias=True)),
    "phi3": ("phi3", dict(_GQA, sliding_window=9)),
    "phi3-partial": (
        "phi3",
        dict(_SIZES, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)),
    ),
    "gemma": ("gemma", dict(_MQA, head_dim=8)),
    "gemma-gqa": ("gemma", dict(_GQA, head_dim=16)),
    "gemma2": ("gemma2", dict(_GQA, head_dim=8, sliding_window=7, query_pre_attn_scalar=16)),
    "gemma2-nocap": (
        "gemma2",
        dict(_GQA, head_dim=12, attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=5),
    ),
    "olmo2": ("olmo2", _GQA),
    "olmo2-mha": ("olmo2", dict(_SIZES, tie_word_embeddings=True)),
    "starcoder2": ("starcoder2", _GQA),
    "starcoder2-window": ("starcoder2", dict(_MQA, sliding_window=7, use_bias=False, tie_word_embeddings=False)),
    "granite": (
        "granite",
        dict(
            _GQA,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=8.0,
            tie_word_embeddings=True,
        ),
    ),
    "stablelm": ("stablelm", dict(_GQA, hidden_size=64)),
    "stablelm-parallel": (
        "stablelm",
        dict(_SIZES, num_key_value_heads=4, hidden_size=64, use_parallel_residual=True, use_qkv_bias=True),
    ),
}
"""Name of a case -> (family, fields of the Hugging Face configuration)."""


def make_model(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """A `transformers` model with random values everywhere: norms are not ones, biases are not zeros."""
    family, fields = CASES[case]
    config = transformers.AutoConfig.for_model(family, **{**_NO_TOKENS, **fields}, attn_implementation="eager")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_model(case: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model, save it as `transformers` does, and return it."""
    model = make_model(case, dtype)
    model.save_pretrained(directory)
    return model
