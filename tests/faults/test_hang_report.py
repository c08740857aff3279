"""Who is blamed for a hang, and that each rank's wait is read right."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdsp.engine.hang_report import RankReport, culprits, hang_table, waits_for
from mdsp.topology import Coordinates, Topology

TOPOLOGY = Topology(tensor=2, pipeline=2, data=2)


def report(rank: int, instruction: str | None, communicating: bool = True) -> RankReport:
    return RankReport(rank, "host", 100 + rank, 7, 90.0, instruction, 3, 80.0, communicating, ["  File x\n    call()"])


@pytest.mark.parametrize(
    ("stage", "instruction", "peers"),
    [
        (0, "send_activation", [(1, 0, 0)]),
        (1, "recv_activation", [(0, 0, 0)]),
        (0, "recv_grad", [(1, 0, 0)]),
        (1, "send_grad", [(0, 0, 0)]),
        (0, "forward", [(0, 0, 1)]),
        (1, "backward", [(1, 0, 1)]),
        (1, "reduce_grads", [(1, 1, 0)]),
        (0, "reduce_tied", [(1, 0, 0)]),
    ],
)
def test_whom_an_instruction_waits_for(stage: int, instruction: str, peers: list[tuple[int, int, int]]) -> None:
    rank = TOPOLOGY.rank(Coordinates(stage, 0, 0))
    expected = [TOPOLOGY.rank(Coordinates(*peer)) for peer in peers]
    assert waits_for(report(rank, instruction), TOPOLOGY) == expected


def test_computation_waits_for_nobody() -> None:
    assert waits_for(report(0, "forward", communicating=False), TOPOLOGY) == []


def test_a_rank_without_a_report_is_blamed() -> None:
    found = {rank: report(rank, "optimizer") for rank in range(7)}
    assert culprits(found, {7: "process 107 is stopped (SIGSTOP)"}, TOPOLOGY) == [7]
    table = hang_table(
        found, {7: "process 107 is stopped (SIGSTOP)"}, TOPOLOGY, "step 7", 60.0, lambda rank: Path(f"log{rank}")
    )
    assert "rank 7, which does not answer: process 107 is stopped (SIGSTOP); its log is log7" in table
    assert sum(line.split()[:1] == [str(rank)] for line in table.splitlines() for rank in range(8)) == 8


def test_the_one_that_computes_is_blamed() -> None:
    found = {rank: report(rank, "recv_grad") for rank in range(8)}
    found[5] = report(5, "backward", communicating=False)
    assert culprits(found, {}, TOPOLOGY) == [5]
    assert "Likely culprit: rank 5 (process 105 on host)" in hang_table(
        found, {}, TOPOLOGY, "step 7", 60.0, lambda rank: Path("log")
    )


def test_a_rank_that_went_past_the_meeting_is_blamed() -> None:
    """Rank 0 waits for stage 1 to send a gradient, whose rank is in a collective with its data group."""
    partner = TOPOLOGY.rank(Coordinates(1, 0, 0))
    found = {0: report(0, "recv_grad"), partner: report(partner, "reduce_grads")}
    assert partner in culprits(found, {}, TOPOLOGY)
