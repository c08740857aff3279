"""The bubble measured on DeepSpeed's real engine, one process a stage, with sleeps for work."""

from __future__ import annotations

import pytest

from mdsp.metrics.advice import advise
from mdsp.metrics.bubble import StepBubble, analyse_step
from tests.harness import run_ranks
from tests.metrics.sleeping_pipeline import Setting, measure

PASSES = (0.04, 0.08)
"""Seconds of a forward and a backward pass: long beside the milliseconds that the engine needs for each of them."""
PASSES_OF_EIGHT = (0.12, 0.24)
"""With eight ranks on two cores the engine's own work on a micro-batch (Python, gloo's threads, waking up) takes about
4 ms of the critical path, whatever the length of the passes: 3 % of `PASSES`, 1 % of these."""
DELAY = 0.06


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_bubble_is_that_of_the_theory(stages: int) -> None:
    """For M in {P, 2P, 8P} micro-batches within 2 percentage points, for the job and for every stage."""
    passes = PASSES_OF_EIGHT if stages == 8 else PASSES
    settings = [Setting(count, *passes) for count in (stages, 2 * stages, 8 * stages)]
    timelines = run_ranks(measure, stages, settings, seconds=300)[0]
    for setting, timeline in zip(settings, timelines, strict=True):
        bubble = analyse_step(timeline)
        theory = (stages - 1) / (setting.micro_batches + stages - 1)
        assert bubble.micro_batches == setting.micro_batches
        assert bubble.bubble == pytest.approx(theory, abs=0.02)
        assert [stage.bubble for stage in bubble.stages] == pytest.approx([theory] * stages, abs=0.02)
        assert bubble.parts.warmup_drain / bubble.window_s == pytest.approx(theory, abs=0.02)
        check_sum(bubble)


def test_a_slow_stage_and_a_delayed_send_are_told_apart() -> None:
    stages, micro_batches = 4, 8
    settings = [
        Setting(micro_batches, *PASSES),
        Setting(micro_batches, *PASSES, slow_stage=2),
        Setting(micro_batches, *PASSES, delayed_sender=1, delay_s=DELAY),
    ]
    plain, slow, delayed = (analyse_step(timeline) for timeline in run_ranks(measure, stages, settings)[0])
    check_slow(slow, plain, 2)
    check_delayed(delayed, plain, 1)
    check_sum(slow)
    check_sum(delayed)


def check_sum(bubble: StepBubble) -> None:
    for stage in bubble.stages:
        assert stage.parts.total == pytest.approx(bubble.step_s, abs=1e-9)


def check_slow(bubble: StepBubble, plain: StepBubble, slow: int) -> None:
    """One stage 1.5 times slower: named, and the imbalance is the time that it costs the others."""
    stages, micro_batches, one = len(bubble.stages), bubble.micro_batches, sum(PASSES)
    assert bubble.slowest.stage == slow
    assert bubble.slowest.busy_s / plain.stages[slow].busy_s == pytest.approx(1.5, abs=0.05)
    longer = bubble.window_s - plain.window_s
    assert longer > 0.9 * 0.5 * one * (micro_batches - 1)
    for stage in bubble.stages:
        # Of the longer step, the fast stages idle all but what the larger mean adds to warm-up and drain.
        expected = 0.0 if stage.stage == slow else longer - 0.5 * one * (stages - 1) / stages
        assert stage.parts.imbalance == pytest.approx(expected, rel=0.1, abs=0.05)
    assert bubble.parts.waiting / bubble.step_s < 0.04


def check_delayed(bubble: StepBubble, plain: StepBubble, sender: int) -> None:
    """Every send of one stage delayed: the waiting is what the step became longer, and the link is named."""
    longer = bubble.window_s - plain.window_s
    assert longer > DELAY
    for stage in bubble.stages:
        assert stage.parts.waiting == pytest.approx(longer, rel=0.1, abs=0.05)
    worst = max(bubble.links, key=lambda link: link.transfer_s)
    assert (worst.source, worst.target, worst.kind) == (sender, sender + 1, "activation")
    assert bubble.parts.imbalance / bubble.step_s < 0.02
    advice = advise(bubble)
    assert advice is not None
    if advice.part == "waiting":
        assert f"activations from stage {sender} to {sender + 1}" in advice.sentence
