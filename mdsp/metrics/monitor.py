"""Sends a run's series to W&B, TensorBoard and CSV through DeepSpeed's monitor; failures never stop training."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mdsp.metrics.record import StepRecord
from mdsp.metrics.series import values

_log = logging.getLogger("mdsp")


class EventWriter(Protocol):
    """What DeepSpeed's `MonitorMaster` (the engine's `monitor`) offers."""

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None: ...


class Monitor:
    """Writes step records as monitor events.

    The horizontal axis is the number of samples, as in the events that DeepSpeed writes itself: W&B takes steps only
    in rising order, so one run cannot mix two axes. Steps and tokens are series of their own, for charts over them.
    """

    def __init__(self, writer: EventWriter | None) -> None:
        # DeepSpeed's monitor has a writer per service; asked one by one, a failing one does not silence the others.
        parts = [
            getattr(writer, name, None) for name in ("tb_monitor", "wandb_monitor", "csv_monitor", "comet_monitor")
        ]
        self._writers: list[EventWriter] = [part for part in parts if part is not None]
        if writer is not None and not self._writers:
            self._writers = [writer]
        self._warned: set[int] = set()

    def step(self, record: StepRecord) -> None:
        """Write everything that the record has."""
        if not self._writers:
            return
        events = [(key, value, record.samples) for key, value in values(record.as_dict()).items()]
        for index, writer in enumerate(self._writers):
            try:
                writer.write_events(events)
            except Exception as error:  # a tracker may raise anything; a lost chart is not worth a lost run
                if index not in self._warned:
                    self._warned.add(index)
                    name = type(writer).__name__
                    _log.warning("%s failed (%s: %s); training goes on", name, type(error).__name__, error)


def start_wandb(
    section: dict[str, Any],
    run_directory: str | os.PathLike[str],
    run_info: dict[str, Any],
    enabled: bool,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Open the W&B run of the "wandb" section of the configuration, before DeepSpeed does.

    The engine's monitor then continues this run. `run_id` is the id of the run whose chart it continues, as the
    checkpoint knows it; a fresh start gets a new one, because W&B takes no step twice. Returns the section to hand to
    DeepSpeed: where W&B cannot be reached the run is kept on disk for `wandb sync`; where not even that works, the
    section comes back switched off, because DeepSpeed's own attempt would end the training. Does nothing when the
    section is off, or on ranks without `enabled`.
    """
    if not enabled or not section.get("enabled"):
        return section
    directory = Path(run_directory)
    try:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        common: dict[str, Any] = dict(
            project=section.get("project", "deepspeed"),
            group=section.get("group"),
            entity=section.get("team"),
            id=run_id or uuid.uuid4().hex[:8],
            dir=str(directory),
            config=run_info,
        )
        try:
            wandb.init(**common, resume="allow")
        except Exception as error:  # no network, no login
            _log.warning(
                "W&B cannot be reached (%s: %s); the run is kept in %s, upload it later with: wandb sync",
                *(type(error).__name__, error, directory / "wandb"),
            )
            wandb.teardown()  # its service still holds the id of the run that did not start
            wandb.init(**common, mode="offline")
    except Exception as error:  # not installed, a full disk
        _log.warning("W&B cannot start (%s: %s); training goes on without it", type(error).__name__, error)
        return {**section, "enabled": False}
    return section


def finish_wandb() -> None:
    """Close the W&B run, if one is open, so that its last values are written."""
    wandb = sys.modules.get("wandb")
    try:
        if wandb is not None and wandb.run is not None:
            wandb.finish()
    except Exception as error:
        _log.warning("W&B did not end cleanly (%s: %s)", type(error).__name__, error)
