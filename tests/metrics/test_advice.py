"""Advice names the cause that was put into a simulated pipeline, promises what comes true, and is silent otherwise."""

from __future__ import annotations

import re

import pytest

from mdsp.metrics.advice import advise
from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.timeline import Instruction
from tests.metrics.simulator import simulate_1f1b


def test_more_micro_batches_and_the_promise_comes_true() -> None:
    advice = advise(analyse_step(simulate_1f1b([1.0] * 4, [2.0] * 4, 4)))
    assert advice is not None
    assert advice.sentence.startswith("raise gradient_accumulation_steps from 4 to 16: predicted bubble 43 % -> 16 %")
    after = analyse_step(simulate_1f1b([1.0] * 4, [2.0] * 4, 16))
    assert round(100 * after.bubble) == 16


def test_a_slow_stage_with_equal_layers_is_a_slow_device() -> None:
    scale = [1.0, 1.0, 1.0, 1.5]
    bubble = analyse_step(simulate_1f1b(scale, [2 * x for x in scale], 32))
    advice = advise(bubble, blocks_per_stage=[1] * 4)
    assert advice is not None
    assert advice.part == "imbalance"
    assert advice.sentence.startswith("stage 3 is 1.33 x slower than the mean with as many layers as the others")


def test_one_layer_too_many_is_moved_and_the_promise_comes_true() -> None:
    layers = [4, 6, 4, 4]
    before = simulate_1f1b([float(n) for n in layers], [2.0 * n for n in layers], 32)
    advice = advise(analyse_step(before), blocks_per_stage=layers)
    assert advice is not None
    assert "stage 1 is 1.33 x slower than the mean: move one layer from it to stage 0" in advice.sentence
    moved = [5, 5, 4, 4]
    after = simulate_1f1b([float(n) for n in moved], [2.0 * n for n in moved], 32)
    length = [max(i.end_s for i in timeline) for timeline in (before, after)]
    found = re.search(r"predicted step (\d+) % shorter", advice.sentence)
    assert found is not None
    assert int(found[1]) == pytest.approx(100 * (1 - length[1] / length[0]), abs=2)


def test_a_slow_link_is_named() -> None:
    def delay(stage: int, kind: str, micro_batch: int) -> float:
        return 1.0 if (stage, kind) == (2, "grad") else 0.0

    advice = advise(analyse_step(simulate_1f1b([1.0] * 4, [2.0] * 4, 32, delay)))
    assert advice is not None
    assert advice.part == "waiting"
    assert "gradients from stage 2 to 1, 1000.0 ms each" in advice.sentence


def test_slow_data_and_a_long_reduction_are_named() -> None:
    step = [Instruction(0, 0, "load", m, m * 3.0, m * 3.0 + 1.0) for m in range(4)]
    step += [Instruction(0, 0, "forward", m, m * 3.0 + 1.0, m * 3.0 + 3.0) for m in range(4)]
    advice = advise(analyse_step(step))
    assert advice is not None
    assert advice.sentence == "stage 0 loads data for 33 % of the step: speed up the loader"
    advice = advise(analyse_step([*step[4:], Instruction(0, 0, "reduce_grads", -1, 12.0, 40.0)]))
    assert advice is not None
    assert advice.part == "data_parallel"


def test_a_good_pipeline_gets_no_advice() -> None:
    assert advise(analyse_step(simulate_1f1b([1.0] * 4, [2.0] * 4, 64))) is None
    assert advise(analyse_step([Instruction(0, 0, "forward", 0, 0.0, 1.0)])) is None
