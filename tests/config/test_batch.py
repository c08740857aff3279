"""Batch arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsp.config.batch import Batch, resolve_batch
from mdsp.config.problems import Problem


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_any_two_determine_the_third(micro: int, steps: int, data: int) -> None:
    whole = Batch(micro * steps * data, micro, steps)
    assert resolve_batch(whole.global_batch, micro, steps, data) == whole
    assert resolve_batch(None, micro, steps, data) == whole
    assert resolve_batch(whole.global_batch, None, steps, data) == whole
    assert resolve_batch(whole.global_batch, micro, None, data) == whole


def test_one_number_follows_deepspeed() -> None:
    assert resolve_batch(12, None, None, 3) == Batch(12, 4, 1)
    assert resolve_batch(None, 2, None, 3) == Batch(6, 2, 1)
    assert resolve_batch(None, None, 5, 3) == Batch(15, 1, 5)


@pytest.mark.parametrize(
    ("train", "micro", "steps", "data", "line"),
    [
        (None, None, None, 1, "train_batch_size: give it"),
        (7, 2, None, 2, "train_batch_size = 7: must be a multiple of the data-parallel degree 2"),
        (1, None, None, 4, "nearest: 4, 8"),
        (8, 3, None, 1, "train_micro_batch_size_per_gpu = 3: must divide the 8 samples"),
        (8, 3, None, 1, "nearest: 1, 2, 4, 8"),
        (8, None, 3, 1, "gradient_accumulation_steps = 3: must divide the 8 samples"),
        (8, 2, 2, 4, "= 16; set it to 16"),
    ],
)
def test_numbers_that_do_not_fit(train: int | None, micro: int | None, steps: int | None, data: int, line: str) -> None:
    found = resolve_batch(train, micro, steps, data)
    assert isinstance(found, Problem)
    assert line in found.line()


@given(*[st.none() | st.integers(1, 40)] * 3, st.integers(1, 12))
def test_the_product_always_holds(train: int | None, micro: int | None, steps: int | None, data: int) -> None:
    found = resolve_batch(train, micro, steps, data)
    if isinstance(found, Batch):
        assert found.global_batch == found.micro_batch * found.accumulation * data
        assert train in (None, found.global_batch)
        assert micro in (None, found.micro_batch)
        assert steps in (None, found.accumulation)
    else:
        assert found.key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
