"""One sentence of advice from a measured bubble, only when the numbers support it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsp.metrics.bubble import StepBubble
from mdsp.metrics.theory import Schedule, theoretical_bubble

WORTHWHILE = 0.05
"""Advice must promise at least this share of the step."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change, and what it would gain."""

    part: str
    """The part of the step (a name of `bubble.Parts`) that it addresses."""
    gain: float
    """Share of the step that it is predicted to save, 0..1."""
    sentence: str


def advise(
    bubble: StepBubble, schedule: Schedule = "1f1b", blocks_per_stage: Sequence[int] | None = None
) -> Advice | None:
    """The change with the largest predicted gain, or None when none is worth it.

    `blocks_per_stage` are the transformer blocks of each stage; without them no block can be told to move.
    """
    candidates = [
        _fill(bubble, schedule),
        _imbalance(bubble, blocks_per_stage),
        _waiting(bubble),
        _data(bubble),
        _data_parallel(bubble),
        _optimizer(bubble),
        _tensor_parallel(bubble),
        _checkpoint(bubble),
    ]
    worth = [c for c in candidates if c is not None and c.gain >= WORTHWHILE]
    return max(worth, key=lambda c: c.gain, default=None)


def _share(bubble: StepBubble, seconds: float) -> float:
    return seconds / bubble.step_s


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _fill(bubble: StepBubble, schedule: Schedule) -> Advice | None:
    stages, now = len(bubble.stages), bubble.micro_batches
    if stages == 1:
        return None
    # Doubling until a fifth is left: beyond, the batch grows faster than the bubble shrinks.
    more = now
    while theoretical_bubble(stages, more, schedule) > 0.2 and more < 8 * now:
        more *= 2
    if more == now:
        return None
    # Per micro-batch, warm-up and drain shrink in proportion; everything else stays.
    gain = _share(bubble, bubble.parts.warmup_drain) * (1 - now / more)
    busy_share = bubble.mean_busy_s / bubble.window_s
    idle_now = bubble.bubble
    drain = bubble.parts.warmup_drain / bubble.window_s
    predicted = 1 - busy_share / (1 - drain * (1 - now / more))
    return Advice(
        "warmup_drain",
        gain,
        f"raise gradient_accumulation_steps from {now} to {more}: predicted bubble {_percent(idle_now)} -> "
        f"{_percent(predicted)} (with smaller micro-batches the global batch can stay as it is)",
    )


def _imbalance(bubble: StepBubble, blocks_per_stage: Sequence[int] | None) -> Advice | None:
    slow, mean = bubble.slowest, bubble.mean_busy_s
    ratio = slow.busy_s / mean
    if len(bubble.stages) == 1 or ratio < 1.05:
        return None
    gain = _share(bubble, bubble.parts.imbalance)
    what = f"stage {slow.stage} is {ratio:.2f} x slower than the mean"
    if blocks_per_stage is None or len(blocks_per_stage) != len(bubble.stages):
        return Advice("imbalance", gain, f"{what}: give it less work, or look for what slows its device")
    fast = min(bubble.stages, key=lambda s: s.busy_s)
    blocks = blocks_per_stage[slow.stage]
    block_s = min(s.busy_s / max(1, n) for s, n in zip(bubble.stages, blocks_per_stage, strict=True))
    after = max(
        slow.busy_s - block_s,
        fast.busy_s + block_s,
        *(s.busy_s for s in bubble.stages if s.stage not in (slow.stage, fast.stage)),
    )
    if blocks > 1 and after < 0.97 * slow.busy_s:
        return Advice(
            "imbalance",
            min(gain, _share(bubble, slow.busy_s - after)),
            f"{what}: move one layer from it to stage {fast.stage} (mdsp.parallel.blocks_per_stage), predicted "
            f"step {_percent(min(gain, _share(bubble, slow.busy_s - after)))} shorter",
        )
    if len(set(blocks_per_stage)) == 1:
        return Advice("imbalance", gain, f"{what} with as many layers as the others: look for what slows its device")
    return None


def _waiting(bubble: StepBubble) -> Advice | None:
    gain = _share(bubble, bubble.parts.waiting)
    if not bubble.links:
        return None
    worst = max(bubble.links, key=lambda link: link.transfer_s)
    total = sum(link.transfer_s for link in bubble.links)
    each = worst.transfer_s / worst.count
    if total <= 0 or worst.transfer_s < 0.5 * bubble.parts.waiting:
        return None
    what = "activations" if worst.kind == "activation" else "gradients"
    return Advice(
        "waiting",
        gain,
        f"{_percent(gain)} of the step is spent waiting for neighbours; the slowest transfer is {what} from stage "
        f"{worst.source} to {worst.target}, {1e3 * each:.1f} ms each: look at that link",
    )


def _data(bubble: StepBubble) -> Advice | None:
    worst = max(bubble.stages, key=lambda s: s.parts.data)
    share = _share(bubble, worst.parts.data)
    return Advice(
        "data", share, f"stage {worst.stage} loads data for {_percent(share)} of the step: speed up the loader"
    )


def _data_parallel(bubble: StepBubble) -> Advice | None:
    share = _share(bubble, bubble.parts.data_parallel)
    return Advice(
        "data_parallel",
        share / 2,
        f"reducing gradients takes {_percent(share)} of the step: raise gradient_accumulation_steps from "
        f"{bubble.micro_batches} to {2 * bubble.micro_batches}, or use fewer replicas with more pipeline stages",
    )


def _optimizer(bubble: StepBubble) -> Advice | None:
    share = _share(bubble, bubble.parts.optimizer)
    return Advice(
        "optimizer",
        share / 2,
        f"the optimizer takes {_percent(share)} of the step: raise gradient_accumulation_steps from "
        f"{bubble.micro_batches} to {2 * bubble.micro_batches}, or shard it over more replicas",
    )


def _tensor_parallel(bubble: StepBubble) -> Advice | None:
    share = _share(bubble, bubble.parts.tensor_parallel)
    if share < 0.25:
        return None
    return Advice(
        "tensor_parallel",
        share / 2,
        f"tensor-parallel communication takes {_percent(share)} of the step: halve mdsp.parallel.tensor if memory "
        f"allows, and keep its ranks on one node",
    )


def _checkpoint(bubble: StepBubble) -> Advice | None:
    share = _share(bubble, bubble.parts.checkpoint)
    return Advice(
        "checkpoint", share / 2, f"saving takes {_percent(share)} of this step: raise mdsp.checkpoint.interval"
    )
