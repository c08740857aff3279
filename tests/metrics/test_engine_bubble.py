"""The bubble measured on DeepSpeed's real engine, one process a stage, with sleeps for work."""

from __future__ import annotations

import pytest

from mdsp.metrics.advice import advise
from mdsp.metrics.bubble import StepBubble, analyse_step
from tests.harness import run_ranks
from tests.metrics.sleeping_pipeline import Setting, measure

LONG, SHORT = (0.04, 0.08), (0.03, 0.06)
"""Seconds of a forward and a backward pass: long beside the milliseconds that the engine needs for each of them."""
DELAY = 0.06


def settings(stages: int) -> list[Setting]:
    """Three plain steps, one with a slow stage, one with a delayed send."""
    return [
        Setting(stages, *LONG),
        Setting(2 * stages, *LONG),
        Setting(8 * stages, *SHORT),
        Setting(2 * stages, *LONG, slow_stage=stages // 2),
        Setting(2 * stages, *LONG, delayed_sender=stages // 2 - 1, delay_s=DELAY),
    ]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_sleeping_stages(stages: int) -> None:
    timelines = run_ranks(measure, stages, settings(stages))[0]
    found = [analyse_step(timeline) for timeline in timelines]
    for bubble, setting in zip(found[:3], settings(stages), strict=False):
        check_plain(bubble, stages, setting.micro_batches)
    check_slow(found[3], found[1], stages)
    check_delayed(found[4], found[1], stages)
    for bubble in found:
        for stage in bubble.stages:
            assert stage.parts.total == pytest.approx(bubble.step_s, abs=1e-9)


def check_plain(bubble: StepBubble, stages: int, micro_batches: int) -> None:
    """Within 2 percentage points of the theory, job and every stage."""
    theory = (stages - 1) / (micro_batches + stages - 1)
    assert bubble.micro_batches == micro_batches
    assert bubble.bubble == pytest.approx(theory, abs=0.02)
    for stage in bubble.stages:
        assert stage.bubble == pytest.approx(theory, abs=0.02)
    share = bubble.parts.warmup_drain / bubble.window_s
    assert share == pytest.approx(theory, abs=0.02)


def check_slow(bubble: StepBubble, plain: StepBubble, stages: int) -> None:
    """One stage 1.5 times slower: named, and the imbalance is the time that it costs the others."""
    slow, micro_batches = stages // 2, 2 * stages
    assert bubble.slowest.stage == slow
    assert bubble.slowest.busy_s / plain.stages[slow].busy_s == pytest.approx(1.5, abs=0.05)
    one = sum(LONG)
    longer = bubble.window_s - plain.window_s
    assert longer > 0.5 * one * (micro_batches - 1) * 0.9
    for stage in bubble.stages:
        # Of the longer step, the fast stages idle all but what their larger warm-up and drain explains.
        if stage.stage != slow:
            assert stage.parts.imbalance == pytest.approx(longer - 0.5 * one * (stages - 1) / stages, rel=0.1, abs=0.02)
    assert bubble.stages[slow].parts.imbalance < 0.25 * one
    assert bubble.parts.waiting / bubble.step_s < 0.03
    advice = advise(bubble)
    assert advice is not None
    if advice.part == "imbalance":
        assert f"stage {slow}" in advice.sentence


def check_delayed(bubble: StepBubble, plain: StepBubble, stages: int) -> None:
    """Every send of one stage delayed: the waiting is what the step became longer, and the link is named."""
    sender = stages // 2 - 1
    longer = bubble.window_s - plain.window_s
    assert longer > DELAY
    for stage in bubble.stages:
        assert stage.parts.waiting == pytest.approx(longer, rel=0.1, abs=0.04)
    worst = max(bubble.links, key=lambda link: link.transfer_s)
    assert (worst.source, worst.target, worst.kind) == (sender, sender + 1, "activation")
    assert bubble.parts.imbalance / bubble.step_s < 0.02
