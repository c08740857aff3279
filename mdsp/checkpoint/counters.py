"""Counters: where a run stands, what a checkpoint carries besides weights and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from mdsp.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Counters:
    """Where a run stands.

    No random number generator is among it: dropout masks and the sample order are functions of the seed and of these
    numbers, and so is the learning rate.
    """

    step: int = 0
    """Optimizer steps done, those whose update was skipped included."""
    samples: int = 0
    """Cursor in the sample order: where the next batch begins."""
    tokens: int = 0
    """Tokens trained on."""
    best_eval_loss: float | None = None
    """Lowest evaluation loss so far."""
    wandb_run_id: str | None = None
    """The W&B run whose chart continues."""
    skipped_steps: int = 0
    """Steps whose update was skipped."""
    bad_steps: int = 0
    """How many of the last steps in a row."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last accepted steps, by which the loss guard judges a spike."""
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """Ranges `[start, stop)` of the sample order that the run leaves out after a roll-back, in order."""

    def next_samples(self, global_batch: int) -> int:
        """Where a batch that would begin at `samples` begins, ranges that are left out skipped."""
        start = self.samples
        for first, stop in self.skipped_samples:
            if first < start + global_batch and start < stop:
                start = stop
        return start


def counters_of(manifest: Manifest) -> Counters:
    """What a checkpoint says."""
    state = manifest.training
    assert state is not None
    return Counters(
        step=manifest.counters.step,
        samples=manifest.counters.samples,
        tokens=manifest.counters.tokens,
        best_eval_loss=state.best_eval_loss,
        wandb_run_id=state.wandb_run_id,
        skipped_steps=state.skipped_steps,
        bad_steps=state.bad_steps,
        recent_losses=state.recent_losses,
        skipped_samples=state.skipped_samples,
    )
