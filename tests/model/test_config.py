"""ModelConfig: what is derived, and what is refused with a message that names the fields."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table

SMALL: dict[str, Any] = dict(n_layers=2, hidden_size=24, n_heads=6, vocab_size=100)


def test_derived_sizes() -> None:
    config = ModelConfig(**SMALL)
    assert (config.head_dim, config.n_kv_heads, config.ffn_size, config.rotary_dim) == (4, 6, 96, 4)
    assert ModelConfig(**SMALL, head_dim=10).rotary_dim == 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(n_heads=5), "hidden_size 24 is not a multiple of n_heads 5"),
        (dict(n_kv_heads=4), "n_heads 6 is not a multiple of n_kv_heads 4"),
        (dict(position="rotary", rotary_dim=3), "rotary_dim 3 must be even and at most head_dim 4"),
        (dict(position="rotary", rotary_dim=6), "rotary_dim 6 must be even and at most head_dim 4"),
        (dict(shared_norm=True), 'shared_norm needs residual "parallel"'),
        (
            dict(residual="parallel", norm_placement="post"),
            'residual "parallel" needs norm_placement "pre", not "post"',
        ),
        (dict(head_bias=True), "head_bias needs an untied head"),
        (dict(norm_unit_offset=True), 'norm_unit_offset needs norm "rmsnorm"'),
        (dict(hidden_sise=3), "hidden_sise"),
        (dict(hidden_dropout=1.0), "hidden_dropout"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig(**{**SMALL, **fields})
    assert message in str(caught.value)


@given(st.integers(1, 200_000))
def test_padded_vocabulary_depends_on_the_model_only(vocab: int) -> None:
    padded = ModelConfig(**{**SMALL, "vocab_size": vocab}).padded_vocab_size
    assert padded % 128 == 0
    assert vocab <= padded < vocab + 128


@given(st.integers(1, 700), st.integers(1, 9))
def test_vocabulary_shards(vocab: int, tensor: int) -> None:
    """Each row is held once, in order; every rank holds equally many rows, padding included."""
    table = parameter_table(ModelConfig(**{**SMALL, "vocab_size": vocab}))
    embedding = table.by_name["embedding.weight"]
    shards = [embedding.shard(tensor, rank) for rank in range(tensor)]
    rows = [row for shard in shards if shard for row in range(shard.start, shard.stop)]
    assert rows == list(range(vocab))
    lengths = {shard.stop - shard.start + shard.padding for shard in shards if shard}
    assert lengths == {embedding.local_shape(tensor)[0]}
    assert lengths.pop() * tensor >= table.config.padded_vocab_size
