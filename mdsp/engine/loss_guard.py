"""LossGuard: steps whose loss or gradient is not to be trusted do not change the weights, are counted, and have an end.

A NaN or infinite gradient makes the global gradient norm invalid, which is the same number on every rank: DeepSpeed's
optimizers then leave the step out on all of them. A loss spike is known before the optimizer step too, and is handled
the same way: the engine asks the guard, and a rejected step's gradients are made invalid.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

from mdsp.checkpoint.counters import Counters
from mdsp.config.schema import LossGuardConfig
from mdsp.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a step."""

    reason: str | None
    """Why its update was left out; None when it was applied."""
    roll_back: bool = False
    """Whether to return to the last checkpoint and leave the step's samples out."""


class LossGuard:
    """Judges every step. Every rank has one, and all come to the same judgement, since all see the same numbers."""

    def __init__(self, config: LossGuardConfig, max_bad_steps: int, counters: Counters) -> None:
        """counters: where the run stands, so that judging goes on after a resume as it would have."""
        self._config = config
        self._max_bad_steps = max_bad_steps
        self._recent: deque[float] = deque(counters.recent_losses, maxlen=config.window)
        self._bad_steps = counters.bad_steps
        self._last_bad_step = 0

    @property
    def looks_ahead(self) -> bool:
        """Whether the loss must be known before the optimizer step, which costs a small collective."""
        return self._config.spike_deviations is not None

    def rejects(self, loss: float) -> str | None:
        """Why the update of a step with this loss must not be applied; None when it may."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        limit = self._config.spike_deviations
        if limit is None or len(self._recent) < self._config.window // 2:
            return None
        mean, deviation = statistics.fmean(self._recent), statistics.pstdev(self._recent)
        # A run that repeats its losses exactly has no deviation to measure by.
        deviation = max(deviation, 1e-6 * abs(mean))
        if loss <= mean + limit * deviation:
            return None
        return (
            f"its loss {loss:.4f} is {(loss - mean) / deviation:.1f} deviations above the mean {mean:.4f} of the last "
            f"{len(self._recent)} steps (mdsp.train.loss_guard.spike_deviations = {limit:g})"
        )

    def after_step(self, counters: Counters, loss: float, applied: bool) -> tuple[Counters, Verdict]:
        """Account for the step that has just been made.

        Args:
            counters: where the run stands after it.
            loss: its loss.
            applied: whether the optimizer changed the weights.

        Raises:
            TrainingError: `max_bad_steps` in a row were left out.
        """
        if applied:
            self._recent.append(loss)
            if counters.step >= self._last_bad_step:
                self._bad_steps = 0
            return self._counted(counters), Verdict(None)
        reason = self.rejects(loss) or "its gradient is not finite"
        self._bad_steps += 1
        self._last_bad_step = max(self._last_bad_step, counters.step)
        if self._bad_steps >= self._max_bad_steps:
            raise TrainingError(
                f"step {counters.step}: {reason}, and so were the last {self._bad_steps} steps "
                f"(mdsp.train.max_bad_steps). Resume from the last checkpoint with a lower optimizer.params.lr, "
                f"a longer mdsp.train.schedule.warmup or a lower gradient_clipping"
            )
        counters = self._counted(replace(counters, skipped_steps=counters.skipped_steps + 1))
        return counters, Verdict(reason, roll_back=self._config.action == "rollback")

    def _counted(self, counters: Counters) -> Counters:
        recent = tuple(self._recent) if self.looks_ahead else ()
        return replace(counters, bad_steps=self._bad_steps, recent_losses=recent)

    def rolled_back(self, loaded: Counters, left_out: tuple[int, int], known: Counters) -> Counters:
        """The counters to go on with after a roll-back.

        Args:
            loaded: the checkpoint's.
            left_out: samples `[start, stop)` of the offending step.
            known: those before the roll-back, whose left-out samples stay left out.
        """
        self._recent = deque(loaded.recent_losses, maxlen=self._config.window)
        ranges = sorted({*loaded.skipped_samples, *known.skipped_samples, left_out})
        return replace(
            loaded, skipped_samples=tuple(ranges), skipped_steps=known.skipped_steps, bad_steps=self._bad_steps
        )
