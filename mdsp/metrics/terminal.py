"""The terminal of a training run: a live view for a person, plain lines for a log. No torch."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mdsp.metrics.record import StepRecord

_LEVELS = "▁▂▃▄▅▆▇█"
_ROWS_OF_STAGES = 8
"""With more stages than this, the bubbles become one line of levels."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in block characters, the lowest value as the lowest block; longer series are averaged into `width`."""
    if not values:
        return ""
    cells = min(width, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] for value in means)


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Terminal:
    """Shows steps on one rank; on the others (`enabled` false) it shows nothing.

    On a terminal the view is redrawn in place after a step, at most ten times a second, without a thread of its own.
    Elsewhere every `log_interval`-th step, every evaluation and the last step are a line each.
    """

    def __init__(
        self, stream: TextIO, title: str, total_steps: int, enabled: bool = True, log_interval: int = 1
    ) -> None:
        self._console = Console(file=stream, quiet=not enabled, highlight=False)
        self._title = title
        self._total = total_steps
        self._interval = log_interval
        self._live: Live | None = None
        if enabled and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._losses: deque[float] = deque(maxlen=4000)
        self._seconds: deque[float] = deque(maxlen=20)
        self._sampled: StepRecord | None = None
        self._evaluated: StepRecord | None = None
        self._drawn_s = 0.0

    def begin(self) -> None:
        """Start the view."""
        if self._live is not None:
            self._live.start()

    def note(self, text: str) -> None:
        """A line that stays: a checkpoint, a warning."""
        self._console.print(Text(text), soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""
        if math.isfinite(record.loss):
            self._losses.append(record.loss)
        self._seconds.append(record.step_s)
        if record.bubble_measured is not None:
            self._sampled = record
        if record.eval_loss is not None:
            self._evaluated = record
        last = record.step >= self._total
        if self._live is None:
            if record.step % self._interval == 0 or last or record.eval_loss is not None:
                self._console.print(Text(self.line(record)), soft_wrap=True)
        elif last or time.monotonic() - self._drawn_s >= 0.1:
            self._drawn_s = time.monotonic()
            self._live.update(self._view(record), refresh=True)

    def end(self) -> None:
        """Leave the last view on the screen."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def remaining_s(self, record: StepRecord) -> float:
        """Seconds to the last step, from the median of the latest steps, so that one slow step does not count."""
        return max(0, self._total - record.step) * statistics.median(self._seconds)

    def line(self, record: StepRecord) -> str:
        """A step as one line."""
        parts = [f"step {record.step}/{self._total}", f"loss {record.loss:.4f}", f"lr {record.lr:.2e}"]
        if record.eval_loss is not None:
            parts.insert(2, f"held-out {record.eval_loss:.4f}")
        if record.grad_norm is not None:
            parts.append(f"grad norm {record.grad_norm:.3f}")
        if record.skipped:
            parts.append(f"skipped {record.skipped}")
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
        if record.model_tflops_per_device is not None:
            parts.append(f"{record.model_tflops_per_device:.3g} TFLOP/s per device")
        if record.bubble_measured is not None:
            parts.append(f"bubble {100 * record.bubble_measured:.1f} %")
        return "  ".join([*parts, f"ETA {duration(self.remaining_s(record))}"])

    def _view(self, record: StepRecord) -> RenderableType:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        state = f"step {record.step}/{self._total}   ETA {duration(self.remaining_s(record))}"
        bar.add_row(ProgressBar(total=self._total, completed=record.step), Text(state))
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row(Text("loss", style="dim"), Text(f"{record.loss:.4f}", style="bold"), self._loss_curve())
        for title, text in self._numbers(record):
            numbers.add_row(Text(title, style="dim"), Text(text))
        parts: list[RenderableType] = [bar, numbers]
        if self._sampled is not None:
            parts.append(_bubbles(self._sampled))
        return Panel(Group(*parts), title=Text(self._title), title_align="left", border_style="dim")

    def _loss_curve(self) -> Text:
        return Text(sparkline(list(self._losses)), style="cyan")

    def _numbers(self, record: StepRecord) -> list[tuple[str, str]]:
        found = [("learning rate", f"{record.lr:.3e}")]
        if self._evaluated is not None:
            found.append(("held-out loss", f"{self._evaluated.eval_loss:.4f} (step {self._evaluated.step})"))
        if record.grad_norm is not None:
            found.append(("gradient norm", f"{record.grad_norm:.3f}"))
        if record.skipped:
            found.append(("skipped steps", str(record.skipped)))
        found.append(("speed", f"{record.tokens_per_s:,.0f} tokens/s, {record.step_s:.3f} s per step"))
        if record.model_tflops_per_device is not None:
            mfu = "" if record.mfu is None else f", MFU {100 * record.mfu:.1f} %"
            found.append(("model FLOPs", f"{record.model_tflops_per_device:.3g} TFLOP/s per device{mfu}"))
        return found


def _bubbles(record: StepRecord) -> RenderableType:
    """The bubble of the newest sampled step: of the job, in theory, and per stage."""
    assert record.bubble_measured is not None
    theory = "" if record.bubble_theory is None else f" (theory {100 * record.bubble_theory:.1f} %)"
    title = f"bubble {100 * record.bubble_measured:.1f} %{theory}, step {record.step}"
    stages = record.stage_bubble or ()
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("bubble", style="dim"), Text(title.removeprefix("bubble ")))
    if len(stages) > _ROWS_OF_STAGES:
        levels = "".join(_LEVELS[min(7, int(8 * max(0.0, share)))] for share in stages)
        table.add_row(Text("per stage", style="dim"), Text(levels, style="yellow"))
    else:
        for stage, share in enumerate(stages):
            row = Table.grid(padding=(0, 1))
            row.add_row(Bar(1.0, 0.0, max(0.0, share), width=30, color="yellow"), Text(f"{100 * share:.1f} %"))
            table.add_row(Text(f"stage {stage}", style="dim"), row)
    return table
