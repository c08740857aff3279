"""Reads a run directory, finished or still being written. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsp.errors import MdspError
from mdsp.metrics.bubble import StepBubble, analyse_step
from mdsp.metrics.record import EVENTS_FILE, METRICS_FILE, RUN_FILE, TIMELINE_FILE
from mdsp.metrics.timeline import Instruction, unpack


@dataclass(frozen=True)
class Run:
    """What a run wrote down."""

    directory: Path
    info: dict[str, Any]
    """`run.json`."""
    steps: list[dict[str, Any]]
    """Rows of `metrics.jsonl` by step. Where training went back to an earlier step, what came after it is gone."""
    timelines: dict[int, list[Instruction]]
    """Sampled steps."""
    events: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.directory.resolve().name)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) where the value was measured and is a number."""
        found = []
        for row in self.steps:
            value = row.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                found.append((int(row["step"]), float(value)))
        return found

    def last(self, name: str) -> float | None:
        """The newest value of a series."""
        found = self.series(name)
        return found[-1][1] if found else None

    def analyse(self, step: int) -> StepBubble:
        """The bubble of a sampled step, with the run's own schedule."""
        return analyse_step(self.timelines[step], self.info.get("schedule", "1f1b"))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines. Lines that are torn or damaged are skipped; a missing file has none."""
    if not path.is_file():  # a device or a pipe would never end
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def read_run(directory: str | Path) -> Run:
    """Read a run directory. Raises MdspError when it is none."""
    directory = Path(directory)
    if not (directory / METRICS_FILE).exists() and not (directory / RUN_FILE).exists():
        what = "is not a directory" if not directory.is_dir() else f"holds neither {RUN_FILE} nor {METRICS_FILE}"
        raise MdspError(
            f"{directory} {what}; give the directory of a run, as training writes it under mdsp.monitor.dir"
        )
    info: dict[str, Any] = {}
    if (directory / RUN_FILE).exists():
        try:
            info = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise MdspError(f"{directory / RUN_FILE} is damaged ({error}); remove it to read the rest") from error
        if foreign := _foreign(info):
            raise MdspError(f"{directory / RUN_FILE} is not of mdsp: {foreign}; remove it to read the rest")
    steps = _latest_attempt(read_lines(directory / METRICS_FILE))
    last = max(steps, default=0)
    timelines = {
        step: instructions
        for step, row in _latest_attempt(read_lines(directory / TIMELINE_FILE)).items()
        if step <= last and (instructions := _instructions(row))
    }
    events = list(read_lines(directory / EVENTS_FILE))
    return Run(directory, info, [steps[n] for n in sorted(steps)], dict(sorted(timelines.items())), events)


def _foreign(info: Any) -> str | None:
    """What in a `run.json` mdsp does not write; None when it may be its own."""
    if not isinstance(info, dict):
        return f"it holds {json.dumps(info)[:40]} and no object"
    for name in ("model", "layout", "deepspeed", "mdsp"):
        if not isinstance(info.get(name, {}), dict):
            return f"its {name} is {json.dumps(info[name])[:40]} and no object"
    if not isinstance(info.get("parameters", 0), int | float):
        return f"its parameters are {json.dumps(info['parameters'])[:40]} and no number"
    return None


def _instructions(row: dict[str, Any]) -> list[Instruction]:
    """The instructions of a timeline; none where they are not mdsp's, as of a line that is torn."""
    try:
        return unpack(row["instructions"])
    except (KeyError, IndexError, TypeError, ValueError):
        return []


def _latest_attempt(rows: Iterator[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows by step. A row for a step that is already there says that training went back: later steps are forgotten."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if found and step <= next(reversed(found)):
            found = {known: kept for known, kept in found.items() if known < step}
        found[step] = row
    return found
