"""Rotary frequencies and ALiBi slopes against `transformers`; windows and masks against their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from mdsp.model.config import ModelConfig, RopeScaling
from mdsp.model.positions import alibi_slopes, attention_bias, rotary_frequencies

SCALINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(rope_type="linear", factor=4.0), dict(kind="linear", factor=4.0)),
    (
        dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64),
    ),
    (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
        dict(kind="yarn", factor=4.0, original_max_positions=64),
    ),
    (
        dict(
            rope_type="yarn", factor=16.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
            attention_factor=0.7,
        ),
        dict(
            kind="yarn", factor=16.0, original_max_positions=64, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), SCALINGS, ids=lambda value: value.get("rope_type", ""))
def test_stretched_frequencies(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Context extended by linear scaling, by Llama 3's bands and by YaRN: frequencies and factor on cos and sin."""
    base = 10_000.0
    hf = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=1024,
        rope_parameters={"rope_theta": base, **theirs},
    )  # fmt: skip
    wanted, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](hf, torch.device("cpu"))
    config = ModelConfig(
        n_layers=1, hidden_size=256, n_heads=2, vocab_size=10, max_positions=1024, position="rotary", rotary_base=base,
        rope_scaling=RopeScaling(**ours),
    )  # fmt: skip
    found, ours_factor = rotary_frequencies(config)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    assert ours_factor == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 20, 71])
def test_alibi_slopes(heads: int) -> None:
    """Also for numbers of heads that are no power of two."""
    theirs = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs.view(heads, 3)[:, 1])


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8])
@pytest.mark.parametrize("slopes", [None, [0.5, 0.25]])
def test_attention_bias(window: int | None, slopes: list[float] | None) -> None:
    """Query i sees key j when 0 <= i - j < window, less slope x distance."""
    seq = 7
    given = None if slopes is None else torch.tensor(slopes)
    bias = attention_bias(seq, window, given, torch.device("cpu"), torch.float32)
    if slopes is None and (window is None or window >= seq):
        assert bias is None  # plainly causal, which the attention kernel knows by itself
        return
    assert bias is not None
    assert bias.shape == (len(slopes or [0]), seq, seq)
    for head, slope in enumerate(slopes or [0.0]):
        for i in range(seq):
            for j in range(seq):
                seen = 0 <= i - j < (window or seq)
                assert float(bias[head, i, j]) == (-slope * (i - j) if seen else -math.inf)
