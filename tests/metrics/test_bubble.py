"""The measured bubble and its causes against simulated pipelines with known answers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsp.errors import MdspError
from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.theory import theoretical_bubble
from mdsp.metrics.timeline import KINDS, Instruction
from tests.metrics.simulator import simulate_1f1b

FORWARD, BACKWARD = 0.03, 0.06
SHAPES = [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 8 * p)]


def span(instructions: list[Instruction]) -> float:
    return max(i.end_s for i in instructions) - min(i.start_s for i in instructions)


def check_sums(instructions: list[Instruction]) -> None:
    found = analyse_step(instructions)
    for stage in found.stages:
        assert stage.parts.total == pytest.approx(found.step_s, rel=1e-12, abs=1e-12)
        assert min(stage.parts.as_dict().values()) >= 0
    assert found.parts.total == pytest.approx(found.step_s, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "percent"), [(16, 16, 48.4), (16, 128, 10.5), (4, 4, 42.9), (4, 16, 15.8), (1, 7, 0)]
)
def test_theory_of_1f1b(stages: int, micro_batches: int, percent: float) -> None:
    assert 100 * theoretical_bubble(stages, micro_batches) == pytest.approx(percent, abs=0.05)


def test_theory_of_other_schedules() -> None:
    assert theoretical_bubble(4, 8, "zb-h1") == pytest.approx(3 / 27)
    assert theoretical_bubble(4, 8, "interleaved", chunks=2) == pytest.approx(3 / 19)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_equal_stages_have_the_bubble_of_the_theory_and_nothing_else(stages: int, micro_batches: int) -> None:
    timeline = simulate_1f1b([FORWARD] * stages, [BACKWARD] * stages, micro_batches)
    found = analyse_step(timeline)
    assert found.micro_batches == micro_batches
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    for stage in found.stages:
        assert stage.parts.compute == pytest.approx(micro_batches * (FORWARD + BACKWARD))
        assert stage.parts.warmup_drain == pytest.approx((stages - 1) * (FORWARD + BACKWARD))
        assert stage.parts.imbalance == pytest.approx(0, abs=1e-9)
        assert stage.parts.waiting == pytest.approx(0, abs=1e-9)
    check_sums(timeline)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("slow", ["first", "middle", "last"])
def test_a_slow_stage_is_named_and_measured(stages: int, micro_batches: int, slow: str) -> None:
    index = {"first": 0, "middle": stages // 2, "last": stages - 1}[slow]
    scale = [1.5 if stage == index else 1.0 for stage in range(stages)]
    timeline = simulate_1f1b([FORWARD * x for x in scale], [BACKWARD * x for x in scale], micro_batches)
    found = analyse_step(timeline)
    assert found.slowest.stage == index
    mean = sum(scale) / stages
    balanced = span(simulate_1f1b([FORWARD * mean] * stages, [BACKWARD * mean] * stages, micro_batches))
    assert found.parts.waiting == pytest.approx(0, abs=1e-9)
    length, unavoidable = span(timeline), balanced - micro_batches * (FORWARD + BACKWARD) * mean
    for stage in found.stages:
        own = micro_batches * (FORWARD + BACKWARD) * scale[stage.stage]
        assert stage.busy_s == pytest.approx(own)
        # Next to the slow stage the others idle longer than a balanced pipeline would; it itself never does.
        assert stage.parts.warmup_drain == pytest.approx(min(unavoidable, length - own), abs=1e-9)
        assert stage.parts.imbalance == pytest.approx(max(0.0, length - own - unavoidable), abs=1e-9)
        if stage.stage != index:
            assert stage.parts.imbalance > found.stages[index].parts.imbalance
    check_sums(timeline)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("kind", ["activation", "grad"])
def test_a_delayed_send_is_waiting_and_its_link_is_named(stages: int, micro_batches: int, kind: str) -> None:
    sender = stages // 2 - 1 if kind == "activation" else stages // 2

    def delay(stage: int, what: str, micro_batch: int) -> float:
        return 0.02 if stage == sender and what == kind else 0.0

    prompt = simulate_1f1b([FORWARD] * stages, [BACKWARD] * stages, micro_batches)
    timeline = simulate_1f1b([FORWARD] * stages, [BACKWARD] * stages, micro_batches, delay)
    found = analyse_step(timeline)
    longer = span(timeline) - span(prompt)
    assert longer >= 0.02
    for stage in found.stages:
        assert stage.parts.waiting == pytest.approx(longer, abs=1e-9)
        assert stage.parts.imbalance == pytest.approx(0, abs=1e-9)
    worst = max(found.links, key=lambda link: link.transfer_s)
    assert (worst.source, worst.target, worst.kind) == (sender, sender + (1 if kind == "activation" else -1), kind)
    assert worst.count == micro_batches
    check_sums(timeline)


def test_one_stalled_transfer_is_waiting_everywhere() -> None:
    def delay(stage: int, what: str, micro_batch: int) -> float:
        return 1.0 if (stage, what, micro_batch) == (2, "activation", 5) else 0.0

    found = analyse_step(simulate_1f1b([FORWARD] * 4, [BACKWARD] * 4, 8, delay))
    prompt = simulate_1f1b([FORWARD] * 4, [BACKWARD] * 4, 8)
    for stage in found.stages:
        assert stage.parts.waiting == pytest.approx(found.step_s - span(prompt))


def test_reductions_and_the_optimizer_wait_for_the_stages_that_are_late() -> None:
    """Two stages, one micro-batch each, then tied reduction, data-parallel reduction, and the update."""

    def row(stage: int, kind: str, start: float, end: float, micro_batch: int = -1) -> Instruction:
        return Instruction(stage, stage, kind, micro_batch, start, end)  # type: ignore[arg-type]

    timeline = [
        row(0, "load", 0.0, 0.5, 0),
        row(0, "forward", 0.5, 1.5, 0),
        row(0, "tensor_parallel", 1.0, 1.2, 0),
        row(0, "send_activation", 1.5, 1.5, 0),
        row(0, "recv_grad", 1.5, 4.5, 0),
        row(0, "backward", 4.5, 6.5, 0),
        row(0, "reduce_tied", 6.5, 7.0),
        row(0, "reduce_grads", 7.0, 7.25),
        row(0, "optimizer", 7.25, 8.0),
        row(0, "checkpoint", 8.5, 9.0),
        row(1, "recv_activation", 0.0, 1.5, 0),
        row(1, "forward", 1.5, 2.5, 0),
        row(1, "backward", 2.5, 4.5, 0),
        row(1, "send_grad", 4.5, 4.5, 0),
        row(1, "reduce_tied", 4.5, 7.0),
        row(1, "reduce_grads", 7.0, 7.5),
        row(1, "optimizer", 7.5, 8.0),
    ]
    found = analyse_step(timeline)
    first, last = found.stages
    assert (found.step_s, found.window_s) == (9.0, 6.5)
    assert (first.busy_s, last.busy_s) == (3.0, 3.0)
    assert first.bubble == pytest.approx(3.5 / 6.5)
    assert first.parts.as_dict() == pytest.approx(
        dict(
            compute=2.8,
            tensor_parallel=0.2,
            warmup_drain=3.0,
            imbalance=0.0,
            waiting=0.25,  # its own optimizer, before stage 1 came to it
            data_parallel=0.75,
            optimizer=0.5,
            data=0.5,
            checkpoint=0.5,
            other=0.5,
        )
    )
    assert last.parts.as_dict() == pytest.approx(
        dict(
            compute=3.0,
            tensor_parallel=0.0,
            warmup_drain=3.0,  # 1.5 before its first pass, 1.5 of the 2 s before stage 0 reduces
            imbalance=0.0,
            waiting=0.5,  # the late load of stage 0
            data_parallel=1.0,
            optimizer=0.5,
            data=0.0,
            checkpoint=0.0,
            other=1.0,
        )
    )


def test_unnumbered_micro_batches_are_counted_one_by_one() -> None:
    timeline = [Instruction(0, 0, "forward", -1, float(t), t + 1.0) for t in range(5)]
    assert analyse_step(timeline).micro_batches == 5


def test_the_lowest_rank_stands_for_its_stage() -> None:
    timeline = simulate_1f1b([FORWARD] * 2, [BACKWARD] * 2, 4)
    replica = [Instruction(i.stage, i.rank + 2, i.kind, i.micro_batch, i.start_s, i.end_s) for i in timeline]
    assert analyse_step(timeline + replica) == analyse_step(timeline)


def test_a_timeline_without_computation_is_refused() -> None:
    with pytest.raises(MdspError, match="no forward or backward"):
        analyse_step([Instruction(0, 0, "optimizer", -1, 0.0, 1.0)])


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(KINDS), st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=25
    )
)
def test_the_parts_add_up_whatever_the_timeline(rows: list[tuple[int, str, float, float]]) -> None:
    timeline = [Instruction(s, s, k, -1, start, start + length) for s, k, start, length in rows]  # type: ignore[arg-type]
    timeline.append(Instruction(0, 0, "forward", 0, 0.0, 1.0))
    check_sums(timeline)


def test_jitter_never_makes_a_part_negative() -> None:
    for stages, seed in itertools.product((2, 5), range(5)):
        jitter = [1 + 0.3 * ((7 * s + 3 * seed) % 5) / 5 for s in range(stages)]
        check_sums(simulate_1f1b([FORWARD * x for x in jitter], [BACKWARD / x for x in jitter], 3 * stages))
