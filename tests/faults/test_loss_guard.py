"""Steps that are not to be trusted do not change the weights, are counted, and can be rolled back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdsp.checkpoint.counters import Counters
from mdsp.config.schema import LossGuardConfig
from mdsp.engine.loss_guard import LossGuard
from mdsp.errors import TrainingError
from tests.checkpoint.jobs import GLOBAL_BATCH, Layout, micro_batches, run_config, state_of
from tests.harness import run_ranks


@dataclass(frozen=True)
class Result:
    """What a rank saw."""

    skipped: list[int]
    changed: list[bool]
    """Whether weights, master weights or moments changed, for each step made."""
    cursors: list[int]
    """Where each step's samples began."""
    counters: Counters
    state: dict[str, Tensor]
    error: str | None = None


def _spoil(engine: Any, kind: str, rank: int) -> None:
    """Let a gradient of one rank become a NaN in the next backward pass, and only there."""
    if engine.global_rank != rank:
        return
    parameter = next(engine.module.parameters())
    handle = parameter.register_hook(lambda grad: (handle.remove(), grad * float(kind))[1])


def guarded(
    layout: Layout, kind: str, bad_steps: tuple[int, ...], rank: int, guard: dict[str, Any], directory: str, last: int
) -> Result:
    """Train to step `last`; the steps in `bad_steps` (counted as they are made) are spoiled."""
    from mdsp.checkpoint.schedule import Checkpoints
    from mdsp.engine.build import build_engine

    run = run_config(layout, {"dir": directory, "interval": 2}, loss_guard=guard, max_bad_steps=3)
    engine = build_engine(run)
    counters = Counters()
    engine.loss_guard = judge = LossGuard(run.mdsp.train.loss_guard, run.mdsp.train.max_bad_steps, counters)
    checkpoints = Checkpoints(engine, run, Path(directory), lambda text: None)
    skipped: list[int] = []
    changed: list[bool] = []
    cursors: list[int] = []
    error = None
    while counters.step < last:
        cursor = counters.next_samples(GLOBAL_BATCH)
        batches = micro_batches(engine, cursor)
        if cursor // GLOBAL_BATCH + 1 in bad_steps:
            if kind == "spike":
                batches = ((x, (labels, weights * 50)) for x, (labels, weights) in batches)
            else:
                _spoil(engine, kind, rank)
        before = state_of(engine)
        loss = float(engine.train_batch(batches))
        after = state_of(engine)
        cursors.append(cursor)
        changed.append(any(name not in before or not torch.equal(before[name], after[name]) for name in after))
        made = replace(counters, step=counters.step + 1, samples=cursor + GLOBAL_BATCH)
        try:
            counters, verdict = judge.after_step(made, loss, engine.was_step_applied())
        except TrainingError as stop:
            error = str(stop)
            break
        if verdict.reason:
            skipped.append(counters.step)
        if verdict.roll_back:
            counters = checkpoints.roll_back(judge, counters, cursor)
        else:
            checkpoints.after_step(counters, last=False)
    checkpoints.close()
    return Result(skipped, changed, cursors, counters, state_of(engine), error)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_one_ranks_bad_gradient_is_left_out_on_all(precision: str, kind: str, tmp_path: Path) -> None:
    layout = Layout(2, 2, 1, precision)
    results = run_ranks(guarded, 4, layout, kind, (3,), 1, {}, str(tmp_path), 5)
    for result in results:
        assert result.skipped == [3]
        assert result.changed == [True, True, False, True, True]
        assert result.counters.skipped_steps == 1 and result.counters.bad_steps == 0
        assert all(torch.isfinite(value).all() for value in result.state.values())


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    results = run_ranks(guarded, 2, Layout(data=2), "nan", (2, 4, 5, 6, 7), 1, {}, str(tmp_path), 20)
    for result in results:
        assert result.skipped == [2, 4, 5]
        assert result.error is not None and "step 6" in result.error and "max_bad_steps" in result.error
        assert result.changed == [True, False, True, False, False, False]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_spike_is_left_out(precision: str, tmp_path: Path) -> None:
    """It is known before the optimizer step, on every stage and data rank."""
    guard = {"spike_deviations": 20.0, "window": 8}
    results = run_ranks(guarded, 4, Layout(1, 2, 2, precision), "spike", (7,), 0, guard, str(tmp_path), 9)
    for result in results:
        assert result.skipped == [7]
        assert result.changed == [True] * 6 + [False] + [True] * 2
        assert len(result.counters.recent_losses) == 8


def test_rolling_back_leaves_out_the_offending_samples(tmp_path: Path) -> None:
    """Steps 1 ... 5 with step 6's samples bad: back to the checkpoint of step 4, then on without them."""
    rolled = run_ranks(guarded, 2, Layout(pipeline=2), "nan", (6,), 0, {"action": "rollback"}, str(tmp_path / "a"), 8)
    batch = GLOBAL_BATCH
    for result in rolled:
        assert [cursor // batch for cursor in result.cursors] == [0, 1, 2, 3, 4, 5, 4, 6, 7, 8]
        assert result.counters.skipped_samples == ((5 * batch, 6 * batch),)
        assert (result.counters.step, result.counters.samples) == (8, 9 * batch)
        assert result.skipped == [6]
        assert all(torch.isfinite(value).all() for value in result.state.values())


def test_a_constant_bad_place_ends_a_run_that_rolls_back(tmp_path: Path) -> None:
    results = run_ranks(guarded, 1, Layout(), "nan", tuple(range(3, 40)), 0, {"action": "rollback"}, str(tmp_path), 20)
    assert results[0].error is not None and "max_bad_steps" in results[0].error


def test_judging_continues_after_a_resume_as_it_would_have() -> None:
    config = LossGuardConfig(spike_deviations=4.0, window=16)
    losses = [3.0 + 0.1 * math.sin(step) for step in range(30)] + [3.6]
    straight = LossGuard(config, 5, Counters())
    counters = Counters()
    for step, loss in enumerate(losses[:20]):
        counters, _ = straight.after_step(replace(counters, step=step + 1), loss, applied=True)
    resumed = LossGuard(config, 5, counters)
    for step, loss in enumerate(losses[20:-1]):
        assert straight.rejects(loss) is None and resumed.rejects(loss) is None
        counters, _ = straight.after_step(replace(counters, step=step + 21), loss, applied=True)
        resumed.after_step(counters, loss, applied=True)
    assert straight.rejects(losses[-1]) == resumed.rejects(losses[-1]) is not None


def test_left_out_ranges_are_jumped_over() -> None:
    counters = Counters(samples=100, skipped_samples=((108, 116), (116, 124), (140, 148)))
    assert counters.next_samples(8) == 100
    assert replace(counters, samples=104).next_samples(8) == 124
    assert replace(counters, samples=108).next_samples(8) == 124
    assert replace(counters, samples=132).next_samples(8) == 132
    assert replace(counters, samples=148).next_samples(8) == 148
