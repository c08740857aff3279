"""The timeline of a step: what every stage did when, as records, and the cheap recorder that makes them on a CPU.

The engine wraps every instruction that it executes:

    recorder.begin_step()
    with recorder.span("forward", micro_batch):
        ...
    instructions = recorder.end_step()

Times are seconds on the clock of the job's first rank: `time.perf_counter` is one clock for all processes of a Linux
machine, and `clock_offset_s` (see `clock.py`) moves other machines onto it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, get_args

InstructionKind = Literal[
    "forward",
    "backward",
    "weight",
    "tensor_parallel",
    "load",
    "send_activation",
    "recv_activation",
    "send_grad",
    "recv_grad",
    "reduce_tied",
    "reduce_grads",
    "optimizer",
    "checkpoint",
    "other",
]
"""What a stage can be doing. "backward" is the whole backward pass, or only the gradients of activations where the
schedule defers the gradients of weights to "weight" instructions. "tensor_parallel" spans are nested in compute."""

KINDS: tuple[InstructionKind, ...] = get_args(InstructionKind)
COMPUTE_KINDS: frozenset[InstructionKind] = frozenset({"forward", "backward", "weight"})

NO_MICRO_BATCH = -1


@dataclass(frozen=True, slots=True)
class Instruction:
    """One executed instruction."""

    stage: int
    """Pipeline stage."""
    rank: int
    """Global rank that executed it."""
    kind: InstructionKind
    micro_batch: int
    """Index within the step; -1 for what concerns the whole step."""
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def pack(instructions: Iterable[Instruction]) -> list[list[float]]:
    """Rows of numbers `[stage, rank, kind, micro_batch, start, end]`: what travels between ranks and into files."""
    number = {kind: index for index, kind in enumerate(KINDS)}
    return [[i.stage, i.rank, number[i.kind], i.micro_batch, i.start_s, i.end_s] for i in instructions]


def unpack(rows: Iterable[Iterable[float]]) -> list[Instruction]:
    """The inverse of `pack`."""
    return [Instruction(int(s), int(r), KINDS[int(k)], int(m), start, end) for s, r, k, m, start, end in rows]


class _Span:
    """Context manager of one instruction; a class of its own because a generator costs several times more."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: TimelineRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.stop()


_NOTHING: AbstractContextManager[None] = nullcontext()


class TimelineRecorder:
    """Records the instructions of one rank with the host clock: right where the host executes the work itself (CPU).

    Between steps that are recorded, `span`, `start` and `stop` do nothing, so the engine may call them always.
    """

    def __init__(self, stage: int, rank: int, clock_offset_s: float = 0.0) -> None:
        self.stage = stage
        self.rank = rank
        self.clock_offset_s = clock_offset_s
        """Seconds that this rank's clock is ahead of the first rank's."""
        self.active = False
        self._open: list[tuple[InstructionKind, int, float]] = []
        self._done: list[tuple[InstructionKind, int, float, float]] = []
        self._held_up: Instruction | None = None
        self._span: AbstractContextManager[None] = _Span(self)

    @property
    def current(self) -> tuple[InstructionKind, int] | None:
        """Kind and micro-batch of the innermost open instruction, for the watchdog of a hanging step."""
        return self._open[-1][:2] if self._open else None

    def begin_step(self, checkpoint_s: float = 0.0) -> None:
        """Start recording. Saving has held up training for `checkpoint_s` until now, which belongs to the step."""
        now = time.perf_counter() - self.clock_offset_s
        self._held_up = (
            Instruction(self.stage, self.rank, "checkpoint", NO_MICRO_BATCH, now - checkpoint_s, now)
            if checkpoint_s > 0
            else None
        )
        self.active = True
        self._open.clear()
        self._done.clear()

    def span(self, kind: InstructionKind, micro_batch: int = NO_MICRO_BATCH) -> AbstractContextManager[None]:
        """`with recorder.span("forward", 3): ...`; spans may nest."""
        if not self.active:
            return _NOTHING
        self.start(kind, micro_batch)
        return self._span

    def start(self, kind: InstructionKind, micro_batch: int = NO_MICRO_BATCH) -> None:
        """Open an instruction."""
        if self.active:
            self._open.append((kind, micro_batch, time.perf_counter()))

    def stop(self) -> None:
        """Close the innermost open instruction."""
        if self.active and self._open:
            kind, micro_batch, start = self._open.pop()
            self._done.append((kind, micro_batch, start, time.perf_counter()))

    def end_step(self) -> list[Instruction]:
        """Stop recording; the step's instructions by time of start. Instructions still open are dropped."""
        self.active = False
        offset = self.clock_offset_s
        found = [
            Instruction(self.stage, self.rank, kind, micro_batch, start - offset, end - offset)
            for kind, micro_batch, start, end in self._done
        ]
        self._open.clear()
        self._done.clear()
        return self._in_order(found)

    def _in_order(self, found: list[Instruction]) -> list[Instruction]:
        held_up = [] if self._held_up is None else [self._held_up]
        return sorted(held_up + found, key=lambda i: (i.start_s, -i.end_s))
