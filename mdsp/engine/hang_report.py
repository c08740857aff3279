"""The table of a hang: what every rank was doing, whom it waited for, and who is likely to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mdsp.topology import Coordinates, Topology

RECEIVES = {"recv_activation": -1, "recv_grad": 1}
SENDS = {"send_activation": 1, "send_grad": -1}
"""Instructions that wait for the stage so many further on."""


@dataclass(frozen=True)
class RankReport:
    """What one rank was doing."""

    rank: int
    host: str
    pid: int
    step: int
    elapsed_s: float
    """Seconds since the step began."""
    instruction: str | None
    """Kind of the pipeline instruction, None between two."""
    micro_batch: int
    """-1 for instructions that concern the whole step."""
    instruction_s: float
    """Seconds in it."""
    communicating: bool
    """Whether the top of the stack is in a communication call."""
    stack: list[str]
    """Of the main thread, outermost first."""


def waits_for(report: RankReport, topology: Topology) -> list[int]:
    """The ranks whose part this rank's instruction needs; empty when it needs nobody."""
    at = topology.coordinates(report.rank)
    kind = report.instruction
    step = RECEIVES.get(kind or "") or SENDS.get(kind or "")
    if step is not None:
        return [topology.rank(Coordinates((at.stage + step) % topology.pipeline, at.data, at.tensor))]
    if not report.communicating:
        return []
    if kind in ("forward", "backward", "weight"):
        group = [topology.rank(Coordinates(at.stage, at.data, t)) for t in range(topology.tensor)]
    elif kind in ("reduce_grads", "load"):
        group = [topology.rank(Coordinates(at.stage, d, at.tensor)) for d in range(topology.data)]
    elif kind == "reduce_tied":
        group = [topology.rank(Coordinates(s, at.data, at.tensor)) for s in (0, topology.pipeline - 1)]
    else:
        group = list(range(topology.world_size))
    return [rank for rank in group if rank != report.rank]


def culprits(found: dict[int, RankReport], missing: dict[int, str], topology: Topology) -> list[int]:
    """The ranks that the others wait for: those that do not answer, else those that wait for nobody themselves.

    Where all wait, one waits for another that has gone past the meeting: those that are in another instruction than
    the ranks that wait for them.
    """
    if missing:
        return sorted(missing)
    idle = [rank for rank, report in found.items() if not waits_for(report, topology)]
    if idle:
        return sorted(idle)
    astray = {
        peer
        for report in found.values()
        for peer in waits_for(report, topology)
        if peer in found and report.rank not in waits_for(found[peer], topology)
    }
    return sorted(astray)


def hang_table(
    found: dict[int, RankReport],
    missing: dict[int, str],
    topology: Topology,
    what: str,
    budget_s: float,
    log: Callable[[int], Path],
) -> str:
    """The whole message.

    Args:
        found: the reports.
        missing: what is known of ranks without one.
        topology: who waits for whom.
        what: what does not end.
        budget_s: what it was allowed.
        log: the log file of a rank.
    """
    columns = f"{'instruction':<16} {'micro-batch':>11} {'seconds':>8}  waits for"
    lines = [
        f"{what} exceeded its budget of {budget_s:.0f} s (mdsp.train.watchdog); the job ends",
        f"  {'rank':>4} {'stage':>5} {'data':>4} {'tensor':>6}  {columns}",
    ]
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        place = f"  {rank:>4} {at.stage:>5} {at.data:>4} {at.tensor:>6}  "
        if rank not in found:
            lines.append(f"{place}{missing.get(rank, 'no report')}")
            continue
        report = found[rank]
        micro_batch = str(report.micro_batch) if report.micro_batch >= 0 else "-"
        peers = waits_for(report, topology)
        waiting = f"rank {', '.join(map(str, peers))}" if peers else "nobody"
        instruction = report.instruction or "between two"
        lines.append(f"{place}{instruction:<16} {micro_batch:>11} {report.instruction_s:>8.1f}  {waiting}")
    blamed = culprits(found, missing, topology)
    if not blamed:
        lines.append("  No rank stands out: every one waits for another. The stacks are in the logs.")
    for rank in blamed[:3]:
        if rank in missing:
            lines.append(f"  Likely culprit: rank {rank}, which {_as_clause(missing[rank])}; its log is {log(rank)}")
            continue
        report = found[rank]
        lines.append(
            f"  Likely culprit: rank {rank} (process {report.pid} on {report.host}), for "
            f"{report.instruction_s:.0f} s in {report.instruction or 'no instruction'}; its log is {log(rank)}"
        )
        lines.extend(f"    {line}" for entry in report.stack[-3:] for line in entry.splitlines())
    return "\n".join(lines)


def _as_clause(state: str) -> str:
    return f"does not answer: {state}" if state.startswith("process") else state
