"""Balancing pipeline stages: how many transformer blocks each stage gets."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from mdsp.config.schema import ParallelConfig
from mdsp.errors import ConfigError
from mdsp.metrics.flops import Recompute, layer_forward_flops, recompute_flops
from mdsp.model.config import ModelConfig
from mdsp.model.table import FIRST_BLOCK_LAYER, head_layer


def balance_stages(costs: Sequence[float], first_extra: float, last_extra: float, stages: int) -> tuple[int, ...]:
    """Blocks per stage so that the slowest stage is as fast as possible.

    `costs` has one non-negative cost per block, in order; `first_extra` is added to the first stage (embedding) and
    `last_extra` to the last (head). Every stage gets a contiguous run of at least one block. Among the divisions with
    the smallest maximum it takes the one with the smallest sum of squared stage costs, and among these the one with
    more blocks in the middle, where neither the embedding nor the head takes memory. Exact and deterministic; the
    maximum is found by parametric search, the rest by dynamic programming over the few cuts that can reach it.

    Raises ConfigError when there are fewer blocks than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(f"{len(costs)} blocks cannot fill {stages} stages; every stage needs at least one block")
    # Every float is a fraction; over a common denominator all sums and comparisons are exact.
    exact = [Fraction(cost) for cost in (*costs, first_extra, last_extra)]
    scale = math.lcm(*(cost.denominator for cost in exact))
    *scaled, first, last = (int(cost * scale) for cost in exact)
    prefix = [0, *itertools.accumulate(scaled)]
    extras = [0] * stages
    extras[0] += first
    extras[-1] += last
    return _flattest(prefix, extras, _smallest_maximum(prefix, extras))


def _latest_cuts(prefix: Sequence[int], extras: Sequence[int], limit: int) -> list[int] | None:
    """Ends of the stages when each takes as many blocks as `limit` allows; None when some block is left over."""
    blocks, stages, cuts = len(prefix) - 1, len(extras), [0]
    for stage, extra in enumerate(extras):
        start = cuts[-1]
        end = bisect.bisect_right(prefix, limit - extra + prefix[start]) - 1
        end = min(end, blocks - (stages - 1 - stage))  # later stages need a block each
        if end <= start:
            return None
        cuts.append(end)
    return cuts if cuts[-1] == blocks else None


def _smallest_maximum(prefix: Sequence[int], extras: Sequence[int]) -> int:
    """The smallest cost of the slowest stage."""

    def maximum(cuts: Sequence[int]) -> int:
        return max(
            prefix[b] - prefix[a] + extra for (a, b), extra in zip(itertools.pairwise(cuts), extras, strict=True)
        )

    blocks, stages = len(prefix) - 1, len(extras)
    high = maximum([blocks * stage // stages for stage in range(stages + 1)])
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        cuts = _latest_cuts(prefix, extras, middle)
        if cuts is None:
            low = middle
        else:
            high = maximum(cuts)  # at most `middle`
    return high


def _flattest(prefix: Sequence[int], extras: Sequence[int], limit: int) -> tuple[int, ...]:
    """Of the divisions within `limit`, the flattest one, and of equally flat ones the one fullest in the middle."""
    blocks, stages = len(prefix) - 1, len(extras)
    latest = _latest_cuts(prefix, extras, limit)
    # By symmetry, from the other end: the earliest cuts that leave the rest within the limit.
    from_end = _latest_cuts([prefix[-1] - p for p in reversed(prefix)], extras[::-1], limit)
    assert latest is not None and from_end is not None
    earliest = [blocks - cut for cut in reversed(from_end)]
    # Division of the first `cut` blocks -> (sum of squares, distance of the blocks from the middle, all cuts).
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for stage, extra in enumerate(extras):
        # Twice the distance from the middle; of two equally far stages the earlier one counts as nearer.
        distance = 2 * abs(2 * stage - (stages - 1)) + (2 * stage > stages - 1)
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for cut in range(earliest[stage + 1], latest[stage + 1] + 1):
            for start, (squares, distances, cuts) in best.items():
                cost = prefix[cut] - prefix[start] + extra
                if start >= cut or cost > limit:
                    continue
                candidate = (squares + cost * cost, distances + (cut - start) * distance, (*cuts, cut))
                if cut not in following or candidate < following[cut]:
                    following[cut] = candidate
        best = following
    return tuple(b - a for a, b in itertools.pairwise(best[blocks][2]))


def stage_blocks(
    model: ModelConfig, parallel: ParallelConfig, seq_length: int, recompute: Recompute = "none"
) -> tuple[int, ...]:
    """Transformer blocks of each stage: `blocks_per_stage` where it is set, else balanced by FLOPs.

    A block costs its forward and backward FLOPs and what it recomputes; the last stage also has the vocabulary head;
    the embedding is a lookup and costs nothing. Tensor parallelism divides all of these alike.
    """
    if parallel.blocks_per_stage is not None:
        return tuple(parallel.blocks_per_stage)
    # Blocks differ only by their attention window, so the first two say everything.
    forward = [
        layer_forward_flops(model, FIRST_BLOCK_LAYER + block, seq_length) for block in range(min(2, model.n_layers))
    ]
    # Whole numbers of FLOPs: sums are then exact, and equal divisions compare equal.
    costs = [int(3 * block.total + recompute_flops(block, recompute)) for block in forward]
    head = int(3 * layer_forward_flops(model, head_layer(model), seq_length).total)
    return balance_stages([costs[block % len(costs)] for block in range(model.n_layers)], 0, head, parallel.pipeline)
