"""The recorder for accelerators: events on the device's stream, read after one synchronisation per recorded step."""

from __future__ import annotations

import time

import torch

from mdsp.metrics.timeline import Instruction, InstructionKind, TimelineRecorder


class DeviceTimelineRecorder(TimelineRecorder):
    """Records when the device, not the host, reached the start and the end of each instruction.

    The host runs ahead of the device, so its clock says nothing about the device's work. An event is recorded on the
    current stream at each end of each instruction. At the end of the step one more event is recorded and waited for;
    the host clock at that moment anchors all of them (error: the wake-up of the host, some 10 microseconds).
    """

    def __init__(self, stage: int, rank: int, device: torch.device, clock_offset_s: float = 0.0) -> None:
        super().__init__(stage, rank, clock_offset_s)
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        self._used = 0
        self._open_events: list[tuple[InstructionKind, int, torch.cuda.Event]] = []
        self._done_events: list[tuple[InstructionKind, int, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def current(self) -> tuple[InstructionKind, int] | None:
        return self._open_events[-1][:2] if self._open_events else None

    def _event(self) -> torch.cuda.Event:
        # Creating an event costs more than recording one, so they are kept from step to step.
        if self._used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))
        event = self._pool[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin_step(self, checkpoint_s: float = 0.0) -> None:
        super().begin_step(checkpoint_s)
        self._used = 0
        self._open_events.clear()
        self._done_events.clear()

    def start(self, kind: InstructionKind, micro_batch: int = -1) -> None:
        if self.active:
            self._open_events.append((kind, micro_batch, self._event()))

    def stop(self) -> None:
        if self.active and self._open_events:
            kind, micro_batch, start = self._open_events.pop()
            self._done_events.append((kind, micro_batch, start, self._event()))

    def end_step(self) -> list[Instruction]:
        if not self.active:
            return []
        anchor = self._event()
        anchor.synchronize()
        anchor_s = time.perf_counter() - self.clock_offset_s
        self.active = False
        found = []
        for kind, micro_batch, start, end in self._done_events:
            start_s = anchor_s - start.elapsed_time(anchor) / 1e3
            end_s = anchor_s - end.elapsed_time(anchor) / 1e3
            found.append(Instruction(self.stage, self.rank, kind, micro_batch, start_s, end_s))
        self._open_events.clear()
        self._done_events.clear()
        return self._in_order(found)


def timeline_recorder(stage: int, rank: int, device: torch.device, clock_offset_s: float = 0.0) -> TimelineRecorder:
    """The recorder that suits a device: events on CUDA and ROCm, the host clock elsewhere."""
    if device.type == "cuda":
        return DeviceTimelineRecorder(stage, rank, device, clock_offset_s)
    return TimelineRecorder(stage, rank, clock_offset_s)
