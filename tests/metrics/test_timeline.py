"""The recorder: what was open is recorded, nothing is when it is off, and packing loses nothing."""

from __future__ import annotations

import time

import pytest
import torch

from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.device_timeline import DeviceTimelineRecorder, timeline_recorder
from mdsp.metrics.timeline import KINDS, Instruction, TimelineRecorder, pack, unpack


def test_spans_nest_and_come_in_order_of_start() -> None:
    recorder = TimelineRecorder(stage=2, rank=5)
    recorder.begin_step()
    before = time.perf_counter()
    with recorder.span("forward", 3):
        assert recorder.current == ("forward", 3)
        with recorder.span("tensor_parallel"):
            assert recorder.current == ("tensor_parallel", -1)
            time.sleep(0.01)
    recorder.start("backward", 3)
    time.sleep(0.01)
    recorder.stop()
    after = time.perf_counter()
    found = recorder.end_step()
    assert [(i.kind, i.micro_batch, i.stage, i.rank) for i in found] == [
        ("forward", 3, 2, 5),
        ("tensor_parallel", -1, 2, 5),
        ("backward", 3, 2, 5),
    ]
    outer, inner, last = found
    assert before <= outer.start_s <= inner.start_s < inner.end_s <= outer.end_s <= last.start_s < last.end_s <= after
    assert inner.duration_s >= 0.01
    assert recorder.current is None


def test_it_records_only_between_begin_and_end() -> None:
    recorder = TimelineRecorder(0, 0)
    with recorder.span("forward", 0):
        assert recorder.current is None
    recorder.start("backward", 0)
    recorder.stop()
    assert recorder.end_step() == []
    recorder.begin_step()
    recorder.start("forward", 0)
    assert recorder.end_step() == []  # never stopped
    recorder.begin_step()
    with recorder.span("load"):
        pass
    assert [i.kind for i in recorder.end_step()] == ["load"]


def test_an_error_inside_a_span_closes_it() -> None:
    recorder = TimelineRecorder(0, 0)
    recorder.begin_step()

    def fail() -> None:
        with recorder.span("forward", 0):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert recorder.current is None
    assert len(recorder.end_step()) == 1


def test_the_clock_offset_moves_the_times() -> None:
    recorder = TimelineRecorder(0, 0, clock_offset_s=1000.0)
    recorder.begin_step()
    with recorder.span("forward", 0):
        pass
    assert recorder.end_step()[0].start_s == pytest.approx(time.perf_counter() - 1000.0, abs=1.0)


def test_packing_loses_nothing() -> None:
    rows = [Instruction(i, 2 * i, kind, i - 1, 0.5 * i, 0.5 * i + 0.25) for i, kind in enumerate(KINDS)]
    assert unpack(pack(rows)) == rows


def test_the_recorder_suits_the_device() -> None:
    assert type(timeline_recorder(0, 0, torch.device("cpu"))) is TimelineRecorder
    assert isinstance(timeline_recorder(0, 0, torch.device("cuda", 0)), DeviceTimelineRecorder)


def test_nested_communication_counts_once() -> None:
    recorder = TimelineRecorder(0, 0)
    recorder.begin_step()
    with recorder.span("forward", 0), recorder.span("tensor_parallel"):
        time.sleep(0.01)
    parts = analyse_step(recorder.end_step()).parts
    assert parts.tensor_parallel >= 0.01
    assert parts.compute < 0.01
