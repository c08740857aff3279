"""Where a step's time went: the measured pipeline bubble of every stage, and its causes. Pure functions, no torch.

Let the step of P stages and M micro-batches last from the first start of any instruction to the last end, and let the
*pipeline window* end when the last stage has done its last computation. The measured bubble is

    bubble(stage) = 1 - busy(stage) / window        busy: forward, backward and weight passes
    bubble(job)   = mean over stages

which for equal stages and free communication is (P - 1) / (M + P - 1) under 1F1B. The whole step of every stage is
split into parts that add up to it exactly. Every instant belongs to the innermost instruction open at it:

    compute          forward, backward, weight passes
    tensor_parallel  collectives recorded inside them (0 when they are not recorded)
    data             loading micro-batches
    checkpoint       saving
    data_parallel    reducing gradients over replicas and between tied layers, once all who take part have come
    optimizer        the update, once every stage has come to it (the gradient norm is a sum over all stages)
    other            anything else recorded, gaps between instructions, and what precedes the first or follows the last
    idle             the rest: blocked in sends, receives, or in a collective that another stage has not reached,
                     and, inside the window, before the first and after the last instruction

and idle is explained by replaying the recorded passes without communication (see `replay.py`), once as long as they
were and once all equal to their mean; each cause gets at most what is left:

    warmup_drain     length of the equal replay - mean busy: what filling and draining costs when nothing else is wrong;
                     (P - 1) / M of mean busy under 1F1B
    imbalance        length of the recorded replay - busy - warmup_drain: unequal stages, or unequal micro-batches; its
                     mean over stages is about what the step would gain from perfect balance
    waiting          what free transfers would remove: transfers between neighbours, delayed or late ones
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from mdsp.errors import MdspError
from mdsp.metrics.replay import compute_program, replay
from mdsp.metrics.theory import Schedule, theoretical_bubble
from mdsp.metrics.timeline import COMPUTE_KINDS, NO_MICRO_BATCH, Instruction, InstructionKind

_PIPELINE_KINDS: frozenset[InstructionKind] = COMPUTE_KINDS | {
    "send_activation",
    "recv_activation",
    "send_grad",
    "recv_grad",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one step by cause, as the module's docstring defines them."""

    compute: float = 0.0
    tensor_parallel: float = 0.0
    warmup_drain: float = 0.0
    imbalance: float = 0.0
    waiting: float = 0.0
    data_parallel: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, field.name) for field in fields(self))

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


PART_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Parts))


@dataclass(frozen=True, slots=True)
class StageBubble:
    """One stage in one step."""

    stage: int
    busy_s: float
    """Time in forward, backward and weight passes, their tensor-parallel communication included."""
    bubble: float
    """Share of the pipeline window without them, 0..1."""
    parts: Parts
    """Seconds; they add up to the step."""


@dataclass(frozen=True, slots=True)
class Link:
    """Transfers in one direction between two neighbours in one step."""

    source: int
    target: int
    kind: str
    """"activation" or "grad"."""
    count: int
    transfer_s: float
    """Sum over transfers of the time from when both sides were ready to when the receiver had the data."""


@dataclass(frozen=True, slots=True)
class StepBubble:
    """The bubble of one step of the job."""

    step_s: float
    window_s: float
    micro_batches: int
    bubble: float
    """Mean over stages."""
    theory: float
    """The schedule's bubble with equal stages and free communication."""
    parts: Parts
    """Mean over stages, in seconds; they add up to the step."""
    stages: tuple[StageBubble, ...]
    links: tuple[Link, ...]

    @property
    def slowest(self) -> StageBubble:
        return max(self.stages, key=lambda s: s.busy_s)

    @property
    def mean_busy_s(self) -> float:
        return math.fsum(s.busy_s for s in self.stages) / len(self.stages)


def analyse_step(
    instructions: Iterable[Instruction], schedule: Schedule = "1f1b", tied_stages: Sequence[int] | None = None
) -> StepBubble:
    """The bubble of one step from the instructions of one rank per stage.

    Where several ranks of a stage are given, the lowest one stands for it. `tied_stages` are those between which tied
    weights are reduced (default: the first and the last). Raises MdspError for a timeline without any computation.
    """
    by_stage = _by_stage(instructions)
    compute = [i for found in by_stage.values() for i in found if i.kind in COMPUTE_KINDS]
    if not compute:
        raise MdspError("the timeline has no forward or backward instruction, so it has no bubble to measure")
    everything = [i for found in by_stage.values() for i in found]
    start, end = min(i.start_s for i in everything), max(i.end_s for i in everything)
    window_start = min(i.start_s for i in everything if i.kind in _PIPELINE_KINDS or i.kind == "load")
    window_end = max(i.end_s for i in compute)
    micro_batches = max(_count_micro_batches(found) for found in by_stage.values())
    stages = sorted(by_stage)

    tied = set(tied_stages) if tied_stages is not None else {stages[0], stages[-1]}
    ready: dict[InstructionKind, float] = {}
    for kind in ("reduce_tied", "optimizer"):
        starts = [
            i.start_s for s in stages for i in by_stage[s] if i.kind == kind and (kind == "optimizer" or s in tied)
        ]
        ready[kind] = max(starts, default=-math.inf)

    raw: dict[int, tuple[float, dict[str, float]]] = {}
    for stage in stages:
        # A stage without tied weights passes through that instruction without waiting for anybody.
        own_ready = ready if stage in tied else {**ready, "reduce_tied": -math.inf}
        raw[stage] = _classify(by_stage[stage], start, end, window_end, own_ready)

    total_busy = math.fsum(busy for busy, _ in raw.values())
    replayed = replay({stage: compute_program(by_stage[stage]) for stage in stages})
    ideal_idle = max(0.0, replayed.equal_s - total_busy / len(stages))
    window = window_end - window_start
    found_stages = []
    for stage in stages:
        own_busy, seconds = raw[stage]
        idle = seconds.pop("idle")
        without_transfers = min(idle, max(0.0, replayed.as_recorded_s - own_busy))
        warmup_drain = min(without_transfers, ideal_idle)
        imbalance = without_transfers - warmup_drain
        waiting = idle - without_transfers
        parts = Parts(warmup_drain=warmup_drain, imbalance=imbalance, waiting=waiting, **seconds)
        found_stages.append(StageBubble(stage, own_busy, 1 - own_busy / window, parts))
    means = {name: math.fsum(getattr(s.parts, name) for s in found_stages) / len(found_stages) for name in PART_NAMES}
    return StepBubble(
        step_s=end - start,
        window_s=window,
        micro_batches=micro_batches,
        bubble=math.fsum(s.bubble for s in found_stages) / len(found_stages),
        theory=theoretical_bubble(len(stages), micro_batches, schedule),
        parts=Parts(**means),
        stages=tuple(found_stages),
        links=tuple(_links(by_stage)),
    )


def _by_stage(instructions: Iterable[Instruction]) -> dict[int, list[Instruction]]:
    ranks: dict[int, dict[int, list[Instruction]]] = defaultdict(lambda: defaultdict(list))
    for instruction in instructions:
        ranks[instruction.stage][instruction.rank].append(instruction)
    return {stage: found[min(found)] for stage, found in ranks.items()}


def _count_micro_batches(instructions: Sequence[Instruction]) -> int:
    forwards = [i.micro_batch for i in instructions if i.kind == "forward"]
    # Unnumbered forwards count one by one; numbered ones once, as interleaved chunks repeat them.
    return max(1, len({m for m in forwards if m != NO_MICRO_BATCH}) + forwards.count(NO_MICRO_BATCH))


def _innermost(instructions: Sequence[Instruction]) -> list[tuple[float, float, InstructionKind, bool]]:
    """Disjoint segments (start, end, kind, is inside compute) in which one instruction is the innermost open one."""
    segments: list[tuple[float, float, InstructionKind, bool]] = []
    stack: list[Instruction] = []
    now = -math.inf

    def advance(until: float) -> None:
        nonlocal now
        while stack and now < until:
            top = stack[-1]
            stop = min(until, top.end_s)
            if stop > now:
                inside = any(i.kind in COMPUTE_KINDS for i in stack)
                segments.append((now, stop, top.kind, inside))
                now = stop
            if top.end_s <= until:
                stack.pop()
        now = max(now, until)

    for instruction in sorted(instructions, key=lambda i: (i.start_s, -i.end_s)):
        advance(instruction.start_s)
        stack.append(instruction)
    if stack:
        advance(max(i.end_s for i in stack))
    return segments


_PART_OF_KIND: dict[InstructionKind, str] = {
    "forward": "compute",
    "backward": "compute",
    "weight": "compute",
    "tensor_parallel": "tensor_parallel",
    "load": "data",
    "send_activation": "idle",
    "recv_activation": "idle",
    "send_grad": "idle",
    "recv_grad": "idle",
    "reduce_tied": "data_parallel",
    "reduce_grads": "data_parallel",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "other": "other",
}


def _classify(
    instructions: Sequence[Instruction],
    start: float,
    end: float,
    window_end: float,
    ready: dict[InstructionKind, float],
) -> tuple[float, dict[str, float]]:
    """Busy seconds of a stage, and the seconds of every part of its step, with `idle` not yet explained."""
    pieces: dict[str, list[float]] = defaultdict(list)
    busy: list[float] = []
    now = start
    for left, right, kind, inside_compute in _innermost(instructions):
        if left > now:
            pieces["idle" if now == start else "other"].append(left - now)
        ready_s = min(max(ready.get(kind, left), left), right)
        pieces["idle"].append(ready_s - left)
        pieces[_PART_OF_KIND[kind]].append(right - ready_s)
        if inside_compute:
            busy.append(right - left)
        now = right
    if now < window_end:
        pieces["idle"].append(window_end - now)
        now = window_end
    pieces["other"].append(end - now)
    seconds = {name: 0.0 for name in (*PART_NAMES, "idle") if name not in ("warmup_drain", "imbalance", "waiting")}
    seconds.update({name: math.fsum(found) for name, found in pieces.items()})
    return math.fsum(busy), seconds


def _links(by_stage: dict[int, list[Instruction]]) -> list[Link]:
    found = []
    for kind, step in (("activation", 1), ("grad", -1)):
        for stage in sorted(by_stage):
            sends = {i.micro_batch: i for i in by_stage[stage] if i.kind == f"send_{kind}"}
            receives = {i.micro_batch: i for i in by_stage.get(stage + step, ()) if i.kind == f"recv_{kind}"}
            both = [(sends[m], receives[m]) for m in sends.keys() & receives.keys()]
            if both:
                transfer = math.fsum(max(0.0, r.end_s - max(s.start_s, r.start_s)) for s, r in both)
                found.append(Link(stage, stage + step, kind, len(both), transfer))
    return found
