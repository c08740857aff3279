"""Global batches are the same at every layout, resume anywhere, and count what they should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.data.loader import GlobalBatches, evaluation_batches
from mdsp.data.order import SampleOrder
from mdsp.data.tokens import TokenCorpus
from mdsp.errors import ConfigError
from tests.data.raw import write_raw

SEQ, EOD = 6, 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenCorpus:
    """Forty documents of ids 1...; each ends in EOD; in two datasets of different token types."""
    random = np.random.default_rng(5)
    documents = [[*random.integers(1, 90, random.integers(1, 30)).tolist(), EOD] for _ in range(40)]
    directory = tmp_path_factory.mktemp("corpus")
    return TokenCorpus.open(
        [write_raw(directory / "a", documents[:25], code=8), write_raw(directory / "b", documents[25:], code=4)]
    )


def batches(corpus: TokenCorpus, global_batch: int, micro: int, rank: int, size: int, **kwargs: bool) -> GlobalBatches:
    order = SampleOrder(corpus.document_lengths, SEQ, seed=11)
    return GlobalBatches(corpus, order, global_batch, micro, rank, size, eod_id=EOD, **kwargs)


def in_global_order(corpus: TokenCorpus, global_batch: int, micro: int, size: int, consumed: int) -> torch.Tensor:
    """Tokens and last label of a global batch, put together from all ranks by the documented formula."""
    ranks = [batches(corpus, global_batch, micro, rank, size).batch(consumed) for rank in range(size)]
    rows = []
    for m in range(global_batch // (micro * size)):
        for d in range(size):
            rows.append(torch.cat([ranks[d][m].tokens, ranks[d][m].labels[:, -1:]], dim=1))
    return torch.cat(rows)


def test_shapes_types_and_shift(corpus: TokenCorpus) -> None:
    found = batches(corpus, 12, 3, 1, 2).batch(0)
    assert len(found) == 2
    for micro in found:
        assert micro.tokens.shape == micro.labels.shape == micro.loss_mask.shape == (3, SEQ)
        assert micro.tokens.dtype == micro.labels.dtype == torch.int64
        assert micro.loss_mask.dtype == torch.float32
        assert micro.tokens.is_contiguous()
        assert micro.labels.is_contiguous()
        assert torch.equal(micro.tokens[:, 1:], micro.labels[:, :-1])
        assert micro.loss_mask.eq(1).all()


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (12, 1), (2, 2), (1, 3), (3, 4), (1, 12)])
def test_a_global_batch_is_the_same_at_every_layout(corpus: TokenCorpus, micro: int, size: int) -> None:
    order = SampleOrder(corpus.document_lengths, SEQ, seed=11)
    flat = np.concatenate([d.tokens.astype(np.int64) for d in corpus.datasets])
    for consumed in (0, 12, 24 * order.samples_per_epoch - 5):
        expected = flat[order.positions(range(consumed, consumed + 12))]
        assert in_global_order(corpus, 12, micro, size, consumed).numpy().tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5
    )
)
def test_resuming_with_other_batch_shapes_skips_and_repeats_nothing(
    corpus: TokenCorpus, runs: list[tuple[int, int, int, int]]
) -> None:
    seen, consumed = [], 0
    for micro, size, accumulation, steps in runs:
        global_batch = micro * size * accumulation
        for _ in range(steps):
            seen.append(in_global_order(corpus, global_batch, micro, size, consumed))
            consumed += global_batch
    straight = in_global_order(corpus, consumed, 1, 1, 0)
    assert torch.equal(torch.cat(seen), straight)


def test_masked_separators(corpus: TokenCorpus) -> None:
    found = batches(corpus, 64, 8, 0, 2, mask_separators=True).batch(0)
    for micro in found:
        assert torch.equal(micro.loss_mask, (micro.tokens != EOD).float())
    assert any(micro.loss_mask.eq(0).any() for micro in found)


def test_evaluation_counts_every_token_once_at_every_layout(corpus: TokenCorpus) -> None:
    flat = np.concatenate([d.tokens.astype(np.int64) for d in corpus.datasets])
    count = (len(flat) - 1) // SEQ
    for global_batch, micro, size in [(8, 2, 2), (8, 8, 1), (10, 1, 5), (1, 1, 1), (2 * count + 1, 1, 1)]:
        ranks = [evaluation_batches(corpus, SEQ, global_batch, micro, rank, size) for rank in range(size)]
        assert ranks[0].batches_per_epoch == -(-count // global_batch)
        predicted: list[int] = []
        for step in range(ranks[0].batches_per_epoch):
            for m, d in itertools.product(range(ranks[0].micro_batches), range(size)):
                found = ranks[d].batch(step * global_batch)[m]
                predicted += found.labels[found.loss_mask == 1].tolist()
        assert predicted == flat[1 : count * SEQ + 1].tolist()


@pytest.mark.parametrize(("global_batch", "near"), [(10, "8 or 16"), (3, "8"), (0, "8")])
def test_batches_that_do_not_divide_are_refused(corpus: TokenCorpus, global_batch: int, near: str) -> None:
    with pytest.raises(ConfigError, match=f"global batch {global_batch} is not a multiple .* = 8; nearest: {near}$"):
        batches(corpus, global_batch, 4, 0, 2)


def test_masking_needs_to_know_the_separator(corpus: TokenCorpus) -> None:
    order = SampleOrder(corpus.document_lengths, SEQ, seed=11)
    with pytest.raises(ConfigError, match="mask_separators"):
        GlobalBatches(corpus, order, 4, 1, 0, 1, eod_id=None, mask_separators=True)
