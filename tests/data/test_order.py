"""The sample order against a construction with plain lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.data.order import SampleOrder
from mdsp.errors import DataError

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=15).filter(lambda lengths: sum(lengths) > 8)


def shuffled(seed: int, epoch: int, what: int, count: int) -> list[int]:
    """A permutation as documented: MT19937 seeded by SeedSequence([seed, epoch, what]), RandomState.shuffle."""
    items = np.arange(count)
    np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch, what]))).shuffle(items)
    return [int(i) for i in items]


def epoch_by_hand(lengths: list[int], seq_length: int, seed: int, epoch: int) -> list[list[int]]:
    """All samples of an epoch, as positions in the corpus."""
    documents, position = [], 0
    for length in lengths:
        documents.append(list(range(position, position + length)))
        position += length
    stream = [p for d in shuffled(seed, epoch, 0, len(lengths)) for p in documents[d]]
    samples = []
    start = 0
    while start + seq_length + 1 <= len(stream):
        samples.append(stream[start : start + seq_length + 1])
        start += seq_length
    return [samples[i] for i in shuffled(seed, epoch, 1, len(samples))]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(0, 2**63), st.integers(0, 3))
def test_equals_the_construction_by_hand(lengths: list[int], seq_length: int, seed: int, epochs: int) -> None:
    order = SampleOrder(np.array(lengths, dtype=np.int32), seq_length, seed)
    expected = [sample for e in range(epochs + 1) for sample in epoch_by_hand(lengths, seq_length, seed, e)]
    assert order.positions(list(range(len(expected)))).tolist() == expected
    assert order.epoch_of(len(expected) - 1) == epochs


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(0, 5), st.booleans())
def test_every_token_is_an_input_once_per_epoch_but_for_the_tail(
    lengths: list[int], seq_length: int, epoch: int, shuffle: bool
) -> None:
    order = SampleOrder(np.array(lengths), seq_length, seed=7, shuffle=shuffle)
    count, total = order.samples_per_epoch, sum(lengths)
    epoch = epoch if shuffle else 0
    samples = order.positions(list(range(epoch * count, (epoch + 1) * count)))
    uses = Counter(samples[:, :-1].ravel().tolist())
    assert max(uses.values()) == 1
    assert total - seq_length <= len(uses) <= total - 1
    assert all(0 <= position < total for position in uses)


def test_documents_keep_their_inner_order_and_epochs_differ() -> None:
    order = SampleOrder(np.full(50, 40), seq_length=16, seed=3)
    count = order.samples_per_epoch
    first, second = order.positions(range(count)), order.positions(range(count, 2 * count))
    steps = np.diff(first, axis=1)
    inside = first[:, :-1] // 40 == first[:, 1:] // 40
    assert (steps[inside] == 1).all()
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, SampleOrder(np.full(50, 40), 16, seed=4).positions(range(count)))


def test_any_sample_in_any_order_of_asking() -> None:
    lengths = np.array([30, 1, 0, 25, 60])
    order = SampleOrder(lengths, 7, seed=1)
    forward = {i: order.positions([i])[0].tolist() for i in range(60)}
    asked = SampleOrder(lengths, 7, seed=1)
    for i in (59, 0, 31, 30, 58, 1):
        assert asked.positions([i])[0].tolist() == forward[i]
    far = 10**12
    assert asked.positions([far])[0].tolist() == SampleOrder(lengths, 7, seed=1).positions([far])[0].tolist()


def test_without_shuffle_the_corpus_is_read_in_order() -> None:
    order = SampleOrder(np.array([5, 6]), 3, seed=0, shuffle=False)
    assert order.positions([0, 1, 2, 3]).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("lengths", "message"), [([3, 2], "5 tokens, one sample needs 6.*at most 4"), ([], "0 tokens.*; give more text")]
)
def test_a_corpus_shorter_than_a_sample_is_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SampleOrder(np.array(lengths, dtype=np.int64), 5, seed=0)
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(np.array([9]), 5, seed=0).positions([-1])
