"""Timelines as a Chrome trace, which Perfetto reads too: a process per sampled step, a thread per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mdsp.metrics.timeline import NO_MICRO_BATCH, Instruction


def chrome_trace(timelines: Mapping[int, Sequence[Instruction]]) -> dict[str, Any]:
    """The trace of sampled steps (step -> instructions), in the Trace Event Format; times in microseconds.

    Ranks of one stage are threads of their own, beside each other.
    """
    events: list[dict[str, Any]] = []
    for step, instructions in timelines.items():
        origin = min((i.start_s for i in instructions), default=0.0)
        events.append(dict(ph="M", name="process_name", pid=step, tid=0, args=dict(name=f"step {step}")))
        for stage, rank in sorted({(i.stage, i.rank) for i in instructions}):
            name = dict(name=f"stage {stage}, rank {rank}")
            events.append(dict(ph="M", name="thread_name", pid=step, tid=rank, args=name))
            events.append(dict(ph="M", name="thread_sort_index", pid=step, tid=rank, args=dict(sort_index=stage)))
        for i in instructions:
            micro_batch = "" if i.micro_batch == NO_MICRO_BATCH else f" {i.micro_batch}"
            events.append(
                dict(
                    ph="X",
                    name=i.kind + micro_batch,
                    cat=i.kind,
                    pid=step,
                    tid=i.rank,
                    ts=1e6 * (i.start_s - origin),
                    dur=1e6 * i.duration_s,
                    args=dict(stage=i.stage, micro_batch=i.micro_batch),
                )
            )
    return dict(traceEvents=events, displayTimeUnit="ms")
