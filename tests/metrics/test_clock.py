"""Clock offsets between ranks whose clocks are set wrong on purpose, gathered timelines, and memory of all stages."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from mdsp.metrics.clock import estimate_clock_offset, gather_timeline
from mdsp.metrics.memory import gather_peak_memory, peak_memory_bytes
from mdsp.metrics.timeline import Instruction, TimelineRecorder
from tests.harness import run_ranks

CPU = torch.device("cpu")
AHEAD = (0.0, 5.0, -300.25)


def offset_of_a_wrong_clock() -> tuple[float, float]:
    rank = dist.get_rank()
    right = estimate_clock_offset(None, CPU)
    wrong = estimate_clock_offset(None, CPU, clock=lambda: time.perf_counter() + AHEAD[rank])
    return right, wrong


def test_offsets_are_found() -> None:
    for (right, wrong), ahead in zip(run_ranks(offset_of_a_wrong_clock, 3), AHEAD, strict=True):
        assert right == pytest.approx(0.0, abs=0.02)
        assert wrong == pytest.approx(ahead, abs=0.02)


def gathered() -> tuple[list[Instruction] | None, tuple[int, ...]]:
    """Two pipelines of two stages; rank r waits for the ranks before it, on a clock that is r * 100 s ahead."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    recorder = TimelineRecorder(stage=rank // 2, rank=rank, clock_offset_s=-100.0 * rank)
    recorder.begin_step()
    with recorder.span("forward", 7):
        time.sleep(0.01)
    ballast = bytearray(50_000_000 * (rank // 2)) if rank else bytearray()
    ballast[::4096] = b"x" * len(ballast[::4096])
    group = groups[rank % 2]
    return gather_timeline(recorder.end_step(), group), gather_peak_memory(CPU, group)


def test_timelines_and_memory_come_to_the_first_rank_of_each_group() -> None:
    found = run_ranks(gathered, 4)
    assert found[2][0] is None
    assert found[3][0] is None
    for first in (0, 1):
        timeline, memory = found[first]
        assert timeline is not None
        by_rank = {i.rank: i for i in timeline}
        assert sorted(by_rank) == [first, first + 2]
        assert [by_rank[rank].stage for rank in sorted(by_rank)] == [0, 1]
        assert {(i.kind, i.micro_batch) for i in timeline} == {("forward", 7)}
        # Stage 1's clock is 200 s behind; brought to the first rank's, it is 200 s later.
        assert by_rank[first + 2].start_s - by_rank[first].start_s == pytest.approx(200.0, abs=5.0)
        assert memory == found[first + 2][1]
        assert memory[1] - memory[0] == pytest.approx(50e6, rel=0.3)


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory_bytes(CPU)
    block = torch.ones(before // 4 + 25_000_000)
    assert peak_memory_bytes(CPU) - before > 50e6
    assert block.sum() > 0
