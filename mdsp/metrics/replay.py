"""How long a recorded pipeline would have taken if transfers were free: its computations replayed in recorded order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mdsp.metrics.timeline import COMPUTE_KINDS, NO_MICRO_BATCH, Instruction, InstructionKind

Pass = tuple[InstructionKind, int, float]
"""Kind, micro-batch and seconds of one computation."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Lengths in seconds of a pipeline without communication."""

    as_recorded_s: float
    """With every pass as long as it was."""
    equal_s: float
    """With every pass as long as the mean over stages and micro-batches of its kind: the same work, balanced."""


def compute_program(instructions: Sequence[Instruction]) -> list[Pass]:
    """The computations of one stage in order. Unnumbered ones are numbered by occurrence."""
    program: list[Pass] = []
    seen: dict[InstructionKind, int] = defaultdict(int)
    for instruction in sorted(instructions, key=lambda i: i.start_s):
        if instruction.kind in COMPUTE_KINDS:
            kind, number = instruction.kind, instruction.micro_batch
            program.append((kind, seen[kind] if number == NO_MICRO_BATCH else number, instruction.duration_s))
            seen[instruction.kind] += 1
    return program


def replay(programs: Mapping[int, Sequence[Pass]]) -> Replay:
    """Replay the computations of all stages (stage -> its program)."""
    seconds: dict[InstructionKind, list[float]] = defaultdict(list)
    for program in programs.values():
        for kind, _, duration in program:
            seconds[kind].append(duration)
    mean = {kind: math.fsum(found) / len(found) for kind, found in seconds.items()}
    equal = {stage: [(kind, m, mean[kind]) for kind, m, _ in program] for stage, program in programs.items()}
    return Replay(pipeline_length(programs), pipeline_length(equal))


def pipeline_length(programs: Mapping[int, Sequence[Pass]]) -> float:
    """Seconds from the first to the last pass when each starts as soon as its stage and its input are ready.

    The forward of a micro-batch needs the forward on the stage before; its backward needs the backward on the stage
    after. A stage keeps to the order of its program. An input that no stage produces is taken as ready.
    """
    produced = {(stage, kind, m) for stage, program in programs.items() for kind, m, _ in program}
    done: dict[tuple[int, InstructionKind, int], float] = {}
    now = dict.fromkeys(programs, 0.0)
    position = dict.fromkeys(programs, 0)
    forced: int | None = None
    while True:
        progressed = False
        for stage, program in programs.items():
            while position[stage] < len(program):
                kind, m, duration = program[position[stage]]
                source = (stage - 1, kind, m) if kind == "forward" else (stage + 1, kind, m)
                if kind != "weight" and source in produced:
                    if source not in done and forced != stage:
                        break
                    now[stage] = max(now[stage], done.get(source, 0.0))
                now[stage] += duration
                done[stage, kind, m] = now[stage]
                position[stage] += 1
                progressed, forced = True, None
        unfinished = [stage for stage, program in programs.items() if position[stage] < len(program)]
        if not unfinished:
            return max(now.values(), default=0.0)
        # Only a damaged timeline can block here; going on without that input keeps the rest of the answer.
        if not progressed:
            forced = unfinished[0]
