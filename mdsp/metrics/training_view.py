"""What a person sees in the terminal while a run trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from mdsp.config.run_config import RunConfig
from mdsp.metrics.record import StepRecord

if TYPE_CHECKING:
    from mdsp.checkpoint.training import Counters


class TrainingView:
    """Plain lines for now."""

    def __init__(self, run: RunConfig, terminal: TextIO, enabled: bool) -> None:
        self.run = run
        self.console = Console(file=terminal, quiet=not enabled)

    def note(self, text: str) -> None:
        self.console.print(text)

    def begin(self, counters: Counters) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        self.console.print(
            record.step,
            record.loss,
            record.grad_norm,
            record.lr,
            record.tokens_per_s,
            record.bubble_measured,
            record.eval_loss,
        )

    def end(self) -> None:
        pass
