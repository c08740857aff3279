"""Stage balancing against exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsp.config.schema import ParallelConfig
from mdsp.config.stages import balance_stages, stage_blocks
from mdsp.errors import ConfigError
from mdsp.model.config import ModelConfig

COSTS = st.one_of(st.integers(0, 9), st.floats(0, 1e18, allow_nan=False), st.sampled_from([0.1, 0.7, 1e-300]))


def divisions(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, blocks)))


def stage_costs(division: Sequence[int], costs: Sequence[float], first: float, last: float) -> list[Fraction]:
    found, start = [], 0
    for blocks in division:
        found.append(sum(map(Fraction, costs[start : start + blocks]), Fraction(0)))
        start += blocks
    found[0] += Fraction(first)
    found[-1] += Fraction(last)
    return found


@given(st.lists(COSTS, min_size=1, max_size=8), COSTS, COSTS, st.data())
def test_no_division_is_better(costs: list[float], first: float, last: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = balance_stages(costs, first, last, stages)
    assert len(found) == stages and min(found) >= 1 and sum(found) == len(costs)

    def quality(division: Sequence[int]) -> tuple[Fraction, Fraction]:
        each = stage_costs(division, costs, first, last)
        return max(each), sum((cost * cost for cost in each), Fraction(0))

    assert quality(found) == min(map(quality, divisions(len(costs), stages)))


def test_ties_fill_the_middle() -> None:
    assert balance_stages([1] * 6, 0, 0, 4) == (1, 2, 2, 1)
    assert balance_stages([1] * 5, 0, 0, 4) == (1, 2, 1, 1)
    assert balance_stages([1] * 7, 0, 0, 3) == (2, 3, 2)


def test_head_takes_blocks_from_the_last_stage() -> None:
    assert balance_stages([1] * 8, 0, 2, 2) == (5, 3)
    assert balance_stages([1] * 8, 2, 0, 2) == (3, 5)
    assert balance_stages([1] * 4, 0, 100, 2) == (3, 1)


def test_too_few_blocks() -> None:
    with pytest.raises(ConfigError, match="2 blocks cannot fill 3 stages"):
        balance_stages([1, 1], 0, 0, 3)
    with pytest.raises(ConfigError):
        balance_stages([1], 0, 0, 0)


def model(n_layers: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(n_layers=n_layers, hidden_size=64, n_heads=4, vocab_size=vocab_size)


def test_small_vocabulary_gives_equal_stages() -> None:
    assert stage_blocks(model(8, 10), ParallelConfig(pipeline=4), 64) == (2, 2, 2, 2)


def test_large_vocabulary_relieves_the_last_stage() -> None:
    # A block's matrices have 12 h^2 elements; a vocabulary of 24 h costs as much as two blocks.
    assert stage_blocks(model(10, 24 * 64), ParallelConfig(pipeline=3), 1) == (4, 4, 2)


def test_recomputation_makes_blocks_heavier_than_the_head() -> None:
    # The head costs as much as 16 blocks: 3 a = 3 (80 - a) + 48; with recomputation 4 a = 4 (80 - a) + 48.
    wide = model(80, 24 * 64 * 8)
    assert stage_blocks(wide, ParallelConfig(pipeline=2), 1) == (48, 32)
    assert stage_blocks(wide, ParallelConfig(pipeline=2), 1, "full") == (46, 34)


def test_chosen_blocks_are_taken() -> None:
    assert stage_blocks(model(8, 10), ParallelConfig(pipeline=2, blocks_per_stage=[1, 7]), 64) == (1, 7)
