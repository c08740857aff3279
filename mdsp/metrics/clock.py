"""One clock for the job: the offsets between the clocks of its machines, and timelines brought to the first rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mdsp.metrics.timeline import Instruction, pack, unpack


def estimate_clock_offset(
    group: dist.ProcessGroup | None,
    device: torch.device,
    rounds: int = 16,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds that this rank's clock is ahead of the clock of the group's first rank. Collective over the group.

    The first rank plays ping-pong with each other rank. Of a ball sent at `t0`, answered at `t1` (the other's clock)
    and back at `t2`, the offset is `t1 - (t0 + t2) / 2`, wrong by at most half the round trip `t2 - t0`; the quickest
    of the rounds is taken (Cristian 1989). On one machine it is 0 but for that error.

    `device` is where the group's backend takes its tensors: the CPU for gloo, the GPU for NCCL.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    ball = torch.zeros(1, dtype=torch.float64, device=device)
    if rank == 0:
        for peer in range(1, size):
            best_trip, best_offset = float("inf"), 0.0
            for _ in range(rounds):
                sent = clock()
                dist.send(ball, ranks[peer], group=group)
                dist.recv(ball, ranks[peer], group=group)
                theirs = float(ball.item())
                back = clock()
                if back - sent < best_trip:
                    best_trip, best_offset = back - sent, theirs - (sent + back) / 2
            ball.fill_(best_offset)
            dist.send(ball, ranks[peer], group=group)
        return 0.0
    for _ in range(rounds):
        dist.recv(ball, ranks[0], group=group)
        _ = ball.item()  # on a GPU the receipt is only queued until a value is read
        ball.fill_(clock())
        dist.send(ball, ranks[0], group=group)
    dist.recv(ball, ranks[0], group=group)
    return float(ball.item())


def gather_timeline(instructions: Sequence[Instruction], group: dist.ProcessGroup | None) -> list[Instruction] | None:
    """All instructions of a group's ranks on its first rank, by time of start; None elsewhere. Collective.

    Over the pipeline group of data and tensor rank 0 this is one rank of every stage: enough for the bubble, and the
    same amount whatever the number of replicas.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    first = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)[0]
    # Rows of numbers, not objects: receivers unpickle plain lists, and a thousand instructions weigh some 50 KB.
    received: list[list[list[float]]] | None = [[] for _ in range(size)] if rank == 0 else None
    dist.gather_object(pack(instructions), received, dst=first, group=group)
    if received is None:
        return None
    return sorted((i for rows in received for i in unpack(rows)), key=lambda i: (i.start_s, -i.end_s))
