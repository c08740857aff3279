"""The run directory: what a run writes down about itself while it trains. No torch.

    RUN/run.json          configuration, layout, environment, parameter count; once per (re)start
    RUN/metrics.jsonl     one `StepRecord` a line
    RUN/timeline.jsonl    one sampled step a line: {"step": n, "instructions": rows as in `timeline.pack`}
    RUN/events.jsonl      checkpoints, restarts, warnings: {"step", "time", "kind", ...}

Files are only appended to and flushed at every record, so a kill costs at most the line that is being written; the
readers in `run.py` skip such a torn line. A disk that fails is warned about once and never stops training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from mdsp.metrics.timeline import Instruction, pack

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
TIMELINE_FILE = "timeline.jsonl"
EVENTS_FILE = "events.jsonl"
MAX_TIMELINE_BYTES = 32 * 2**20
"""Beyond this size every second timeline is dropped, so that old steps are there ever more sparsely and a long run does
not fill the disk: one timeline of 64 stages and 128 micro-batches takes 1.6 MB. What they said of the bubble stays in
the metrics of their steps."""

_log = logging.getLogger("mdsp")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one optimizer step was. `None` means not measured in this step."""

    step: int
    """Optimizer steps done, this one included, counted from the start of training."""
    loss: float
    """Mean over the target tokens of the global batch."""
    lr: float
    step_s: float
    """Seconds from the end of the last step to the end of this one, without evaluation and checkpoints."""
    tokens: int
    """Tokens trained on so far, this step included."""
    samples: int
    """Samples trained on so far, this step included."""
    tokens_per_s: float
    samples_per_s: float
    grad_norm: float | None = None
    """Global norm before clipping."""
    loss_scale: float | None = None
    skipped: int = 0
    """Steps skipped so far for overflow or NaN."""
    model_tflops_per_device: float | None = None
    """Causal attention halved, nothing recomputed (see `flops.py`)."""
    hardware_tflops_per_device: float | None = None
    """Recomputation added."""
    mfu: float | None = None
    """0..1 of the device's peak, from model FLOPs."""
    hfu: float | None = None
    """0..1 of the device's peak, from hardware FLOPs."""
    bubble_theory: float | None = None
    """0..1, of the schedule with equal stages and free communication."""
    bubble_measured: float | None = None
    """0..1, mean over stages; only in steps with a timeline."""
    bubble_parts_s: dict[str, float] | None = None
    """Seconds by cause, mean over stages (names as in `bubble.Parts`); with `checkpoint_s` where there is any."""
    stage_busy_s: tuple[float, ...] | None = None
    """Seconds in computation, per stage."""
    stage_bubble: tuple[float, ...] | None = None
    """0..1, per stage."""
    memory_bytes: tuple[int, ...] | None = None
    """Peak memory of a device, per stage."""
    data_s: float | None = None
    """Seconds spent waiting for data."""
    checkpoint_s: float | None = None
    """Seconds for which saving a checkpoint held up training since the step before; not part of `step_s`."""
    eval_loss: float | None = None
    """Mean loss over held-out tokens, when this step was followed by an evaluation."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further series by name."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was not measured is left out."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        if not self.extra:
            del found["extra"]
        return found


class RunRecorder:
    """Writes a run directory. Only one rank has it enabled; on the others every method does nothing.

    It may be created over the directory of an earlier attempt: a resumed run continues the same files.
    """

    def __init__(self, directory: str | os.PathLike[str], run_info: dict[str, Any], enabled: bool = True) -> None:
        self.directory = Path(directory)
        self.enabled = enabled
        self._files: dict[str, IO[str]] = {}
        self._warned = False
        if enabled:
            self._attempt(lambda: self._write_run(run_info))

    def step(self, record: StepRecord) -> None:
        """Append one step."""
        self._append(METRICS_FILE, record.as_dict())

    def timeline(self, step: int, instructions: Sequence[Instruction]) -> None:
        """Append the instructions of one sampled step, of all stages."""
        if not self.enabled:
            return
        # Microseconds are as fine as the clocks agree, and half as long to write.
        origin = min((i.start_s for i in instructions), default=0.0)
        rows = [
            [s, r, k, m, round(start - origin, 6), round(end - origin, 6)]
            for s, r, k, m, start, end in pack(instructions)
        ]
        self._append(TIMELINE_FILE, {"step": step, "origin_s": origin, "instructions": rows})

    def event(self, kind: str, step: int, **details: str | float | int | None) -> None:
        """Append something that happened: a checkpoint, an evaluation, a warning."""
        self._append(EVENTS_FILE, {"kind": kind, "step": step, "time": time.time(), **details})

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            self._attempt(file.close)
        self._files.clear()

    def _write_run(self, run_info: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / RUN_FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(
            json.dumps({"started": time.time(), **run_info}, indent=2, default=str) + "\n", encoding="utf-8"
        )
        temporary.replace(path)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if self.enabled:
            self._attempt(lambda: self._write_line(name, row))

    def _write_line(self, name: str, row: dict[str, Any]) -> None:
        file = self._files.get(name)
        if file is None:
            path = self.directory / name
            torn = path.exists() and _is_torn(path)
            file = self._files[name] = path.open("a", encoding="utf-8")
            if torn:
                file.write("\n")  # an earlier attempt died in the middle of a line
        file.write(json.dumps(_plain(row), allow_nan=False, separators=(",", ":")) + "\n")
        file.flush()
        if name == TIMELINE_FILE and file.tell() > MAX_TIMELINE_BYTES:
            del self._files[name]
            file.close()
            _keep_every_second_line(self.directory / name)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError, TypeError) as error:
            if not self._warned:
                self._warned = True
                _log.warning("cannot write to %s (%s); training goes on without its records", self.directory, error)


def _keep_every_second_line(path: Path) -> None:
    """Thin a file of lines; the newest stays. A kill leaves the old file or the new one."""
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    temporary = path.with_suffix(".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        new.writelines(line for index, line in enumerate(old) if (count - 1 - index) % 2 == 0)
    temporary.replace(path)


def _is_torn(path: Path) -> bool:
    """Whether a file of lines ends inside a line."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """For strict JSON: NaN and infinities become null, tensors and numpy scalars numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
