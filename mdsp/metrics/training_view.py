"""What a person sees in the terminal while a run of a given configuration trains."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TextIO

from mdsp.config.run_config import RunConfig
from mdsp.metrics.record import StepRecord
from mdsp.metrics.terminal import Terminal
from mdsp.model.table import parameter_table

if TYPE_CHECKING:
    from mdsp.checkpoint.training import Counters


class _Notes(logging.Handler):
    """Shows warnings that code without a terminal logs: a full disk, a service that cannot be reached."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.note(f"{record.levelname.lower()}: {record.getMessage()}")


class TrainingView:
    """The `Terminal` of a run; shows nothing where `enabled` is false. It also shows what mdsp warns of meanwhile."""

    def __init__(self, run: RunConfig, terminal: TextIO, enabled: bool) -> None:
        layout, millions = run.layout, parameter_table(run.model).numel / 1e6
        title = (
            f"{run.model.family} {millions:,.1f} M parameters, tensor {layout.tensor} x pipeline {layout.pipeline} x "
            f"data {layout.data}, {layout.gradient_accumulation_steps} micro-batches"
        )
        settings = run.mdsp.train
        self._terminal = Terminal(terminal, title, settings.steps, enabled, settings.log_interval)
        self._title = title
        self._notes = _Notes(self._terminal)
        logging.getLogger("mdsp").addHandler(self._notes)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._terminal.note(text)

    def begin(self, counters: Counters) -> None:
        """Training starts after step `counters.step`."""
        self._terminal.note(self._title)
        self._terminal.begin()

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""
        self._terminal.step(record)

    def end(self) -> None:
        """Training is over."""
        self._terminal.end()
        logging.getLogger("mdsp").removeHandler(self._notes)
