"""The predicted timeline of a layout: forwards and backwards of every stage under 1F1B, from stage times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mdsp.plan.layout import Layout
from mdsp.plan.search import Candidate

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward of one micro-batch on one stage."""

    stage: int
    kind: Kind
    micro_batch: int
    start_s: float
    end_s: float


def forward_share(layout: Layout) -> float:
    """Forward's part of forward + backward: the backward costs two forwards, and repeats what is recomputed."""
    return 1 / 4 if layout.recompute == "full" else 1 / 3


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[tuple[Kind, int]]:
    """The order of one stage: P - 1 - stage warm-up forwards, one forward and one backward in turn, then the rest."""
    warm_up = min(stages - 1 - stage, micro_batches)
    order: list[tuple[Kind, int]] = [("forward", m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        order += [("forward", warm_up + m), ("backward", m)]
    return order + [("backward", m) for m in range(micro_batches - warm_up, micro_batches)]


def predicted_timeline(candidate: Candidate, most: int = 0) -> list[Pass]:
    """All passes of a step, each as early as its stage and its input allow. `most` > 0 limits the micro-batches."""
    layout, seconds = candidate.layout, candidate.time.stage_seconds
    stages, count = layout.pipeline, candidate.time.micro_batches
    count = min(count, most) if most else count
    share = forward_share(layout)
    orders = [one_f_one_b(stage, stages, count) for stage in range(stages)]
    position, now = [0] * stages, [0.0] * stages
    done: dict[tuple[int, Kind, int], float] = {}
    passes: list[Pass] = []
    progressed = True
    while progressed:
        progressed = False
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, m = orders[stage][position[stage]]
                needs = (stage - 1, kind, m) if kind == "forward" else (stage + 1, kind, m)
                if 0 <= needs[0] < stages and needs not in done:
                    break
                start = max(now[stage], done.get(needs, 0.0))
                end = start + seconds[stage] * (share if kind == "forward" else 1 - share)
                passes.append(Pass(stage, kind, m, start, end))
                done[stage, kind, m] = now[stage] = end
                position[stage] += 1
                progressed = True
    return passes


def span(passes: list[Pass]) -> float:
    """Seconds from the first to the last pass."""
    return max((p.end_s for p in passes), default=0.0)
