"""The time model: its shape, its laws, and published runs of several sources."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mdsp.plan.constants import PRIORS, Constants, constants_from, default_constants
from mdsp.plan.fit import adapt, fit, log_errors, seconds_of
from mdsp.plan.hardware import parse_cluster
from mdsp.plan.layout import MDSP, Layout, Workload
from mdsp.plan.models import named_model
from mdsp.plan.published import Run, published_run, settle
from mdsp.plan.step_time import step_time

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data/published_rows.jsonl").read_text().splitlines()]
TIMED = ["korthikanti22-t5", "narayanan21", "tr11pre-176B", "dgxc", "zb24", "torchtitan-t3", "mosaic"]
WORK = Workload(named_model("gpt3-13b"), 2048, 256)
CLUSTER = parse_cluster("4x8xA100")
CONSTANTS = default_constants().constants


def _timed_runs() -> list[Run]:
    runs = [published_run(row) for row in ROWS if any(row["id"].startswith(start) for start in TIMED)]
    return [settle(run, seconds_of(CONSTANTS)) for run in runs]


@pytest.mark.parametrize("run", _timed_runs(), ids=lambda run: run.id)
def test_published_step_times(run: Run) -> None:
    """Rows of seven sources within 12 %: constants, the readers of rows and the model all have a part in it."""
    assert seconds_of(CONSTANTS)(run) == pytest.approx(run.measured_s, rel=0.12)


def test_constants_are_within_their_bounds() -> None:
    assert all(prior.low <= getattr(CONSTANTS, name) <= prior.high for name, prior in PRIORS.items())


def test_more_micro_batches_shrink_the_bubble_as_theory_says() -> None:
    layout = Layout(4, 8, 1, recompute="full")
    for batch in (8, 64):
        time = step_time(replace(WORK, global_batch=batch), layout, CLUSTER, MDSP, CONSTANTS)
        assert time.micro_batches == batch
        assert time.bubble == pytest.approx(sum(time.stage_seconds) - max(time.stage_seconds))
        assert time.bubble_share == pytest.approx(7 / (batch + 7), rel=0.1)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (Layout(4, 2, 4), Layout(4, 2, 4, recompute="full")),
        (Layout(4, 2, 4, sequence_parallel=True), Layout(4, 2, 4)),
        (Layout(8, 2, 2), Layout(16, 1, 2)),  # leaves the node
        (Layout(4, 2, 4, micro_batch=2), Layout(4, 8, 1, micro_batch=16)),
    ],
)
def test_orders_that_nobody_disputes(better: Layout, worse: Layout) -> None:
    seconds = [step_time(WORK, layout, CLUSTER, MDSP, CONSTANTS).total for layout in (better, worse)]
    assert seconds[0] < seconds[1]


def test_twice_the_batch_takes_nearly_twice_as_long_and_faster_devices_less() -> None:
    layout = Layout(4, 2, 4)
    once = step_time(WORK, layout, CLUSTER, MDSP, CONSTANTS).total
    twice = step_time(replace(WORK, global_batch=512), layout, CLUSTER, MDSP, CONSTANTS).total
    assert 1.85 < twice / once < 2
    assert step_time(WORK, layout, parse_cluster("4x8xH100"), MDSP, CONSTANTS).total < once / 1.5


def test_no_step_is_faster_than_the_matrix_units() -> None:
    """3 forward passes of 2 FLOPs per parameter at the datasheet's peak are a floor."""
    config = named_model("gpt3-13b")
    floor = 6 * config.n_layers * 12 * config.hidden_size**2 * 256 * 2048 / (32 * 312e12)
    assert step_time(WORK, Layout(1, 1, 32), CLUSTER, MDSP, CONSTANTS).total > floor


def test_fit_recovers_constants_that_made_the_times() -> None:
    """Times made by other constants: the fit goes from a 20 % error to one below the assumed noise."""
    truth = replace(constants_from({}), gemm_ampere=0.70, gemm_hopper=0.65, elementwise=1.8)
    runs = [replace(run, measured_s=seconds_of(truth)(run)) for run in _timed_runs()]
    before = abs(log_errors(runs, constants_from({}))).mean()
    found = fit(runs, iterations=8)
    after = abs(log_errors(runs, found.constants)).mean()
    assert before > 0.08
    assert after < 0.02
    assert found.constants.gemm_ampere == pytest.approx(0.70, rel=0.08)


def test_five_runs_of_a_slower_machine_adapt_the_constants() -> None:
    runs = _timed_runs()
    slow = [replace(run, measured_s=1.25 * seconds_of(CONSTANTS)(run)) for run in runs]
    adapted = adapt(slow[:5], CONSTANTS)
    errors = log_errors(slow[5:], adapted.constants) + adapted.offset
    assert abs(errors).max() < 0.1
    assert isinstance(adapted.constants, Constants)
