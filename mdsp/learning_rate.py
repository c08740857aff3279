"""The learning rate as a pure function of how far training has come, so that a resume needs no scheduler state."""

from __future__ import annotations

import math

from mdsp.config.schema import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, at: int, end: int) -> float:
    """Factor on the peak learning rate of the step that ends at `at`.

    With w = warmup, t = total, m = min_ratio and x = at:

        x <= w     x / w
        constant   1
        linear     1 - (1 - m) p            p = (x - w) / (t - w), at most 1
        cosine     m + (1 - m) (1 + cos(pi p)) / 2
        wsd        1 until t - decay, then linear to m

    Args:
        schedule: the schedule.
        at: steps or tokens (`schedule.unit`) trained on when the step is done; the first step ends at 1 step.
        end: steps or tokens at the end of training, used where `total` is None.
    """
    total = schedule.total or end
    if at <= schedule.warmup:
        return at / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    start = schedule.warmup
    if schedule.kind == "wsd":
        start = max(total - (schedule.decay or max(total // 10, 1)), schedule.warmup)
    progress = min(max(at - start, 0) / max(total - start, 1), 1.0)
    if schedule.kind == "cosine":
        return schedule.min_ratio + (1 - schedule.min_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0 - (1 - schedule.min_ratio) * progress
