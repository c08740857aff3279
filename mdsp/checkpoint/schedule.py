"""Checkpoints: when a run saves, how it hears of a request to stop, and which checkpoints stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mdsp.checkpoint.counters import Counters
from mdsp.checkpoint.resume import find_checkpoint, load_training_checkpoint
from mdsp.checkpoint.rotation import checkpoints_in, is_whole, prune, remove_leftovers, step_of
from mdsp.checkpoint.saving import PendingSave, tokenizer_problem
from mdsp.config.run_config import RunConfig
from mdsp.directory_lock import DirectoryLock
from mdsp.engine.stop_signals import StopSignals, signal_name
from mdsp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine
    from mdsp.engine.loss_guard import LossGuard


class Checkpoints:
    """Saves every n steps, every t minutes, at the end, and when asked to stop.

    All ranks call `after_step` after every step: one all-reduce of three numbers is all that it costs when nothing is
    to be done.
    """

    def __init__(self, engine: MdspEngine, run: RunConfig, directory: Path | None, note: Callable[[str], None]) -> None:
        """
        Collective.

        Args:
            engine: what is saved.
            run: `mdsp.checkpoint` says when.
            directory: where; None: nothing is saved, but requests to stop are heard.
            note: told, on every rank, what happens.

        Raises:
            CheckpointError: on all ranks alike: another job uses the directory, or it cannot be made, or
                `mdsp.data.tokenizer`, which goes into every checkpoint, is no tokenizer.
        """
        self._engine = engine
        self._run = run
        self._config = run.mdsp.checkpoint
        self._directory = directory
        self._note = note
        self._signals = StopSignals()
        self._pending: PendingSave | None = None
        self._saved_step: int | None = None
        self._saved_time = time.monotonic()
        self._stall_s = 0.0
        self._lock: DirectoryLock | None = None
        problem: list[str | None] = [None]
        if directory is not None and dist.get_rank() == 0:
            try:
                self._lock = DirectoryLock(directory, "mdsp.checkpoint.dir")
            except ConfigError as error:
                problem = [str(error)]
            except OSError as error:
                problem = [f"mdsp.checkpoint.dir = {directory} cannot be written: {error.strerror}"]
            else:
                for path in remove_leftovers(directory):
                    note(f"removed {path}, which an interrupted run left behind")
                problem = [tokenizer_problem(run)]
                if others := _beyond(directory, engine.global_steps):
                    note(others)
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise CheckpointError(problem[0])

    @property
    def stall_s(self) -> float:
        """Seconds for which saving has held up training so far, that which is still being written included."""
        return self._stall_s + (self._pending.stall_s if self._pending else 0.0)

    def after_step(self, counters: Counters, last: bool) -> str | None:
        """Save if it is due; returns why training has to stop now, None when it goes on. Collective.

        Args:
            counters: where the run stands.
            last: whether training is over, so that a checkpoint is due.

        Raises:
            CheckpointError: the last checkpoint could not be written. One in the middle of a run that could not is
                noted, and training goes on.
        """
        minutes = self._config.minutes
        time_is_up = minutes > 0 and time.monotonic() - self._saved_time >= 60 * minutes
        writing = self._pending is not None and not self._pending.written
        mine = [self._signals.received, int(time_is_up and dist.get_rank() == 0), int(writing)]
        agreed = torch.tensor(mine, dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        number, time_is_up, writing = agreed.tolist()
        ending = last or number != 0
        if self._directory is not None:
            if self._pending is not None and (ending or not writing):
                self._finish(must_succeed=False)
            by_steps = self._config.interval > 0 and counters.step % self._config.interval == 0
            if ending or by_steps or time_is_up:
                self._save(counters, must_succeed=ending)
        if not number:
            return None
        saved = f"; checkpoint saved after step {counters.step}" if self._directory is not None else ""
        return f"{signal_name(number)} received: training stops after step {counters.step}{saved}"

    def _save(self, counters: Counters, must_succeed: bool) -> None:
        assert self._directory is not None
        if self._saved_step == counters.step:
            return
        if self._pending is not None:
            self._finish(must_succeed=False)
        self._saved_time = time.monotonic()
        background = self._config.background and not must_succeed
        self._pending = PendingSave(self._engine, self._run, self._directory, counters, background)
        if not background:
            self._finish(must_succeed)

    def _finish(self, must_succeed: bool) -> None:
        """Complete the save that was started, whatever it takes."""
        pending, self._pending = self._pending, None
        assert pending is not None and self._directory is not None
        try:
            path = pending.finish()
        except CheckpointError as error:
            if must_succeed:
                raise
            self._note(f"warning: {error}")
            return
        finally:
            self._stall_s += pending.stall_s
        self._saved_step = step = pending.counters.step
        if pending.remark:
            self._note(f"warning: {pending.remark}")
        self._note(f"checkpoint {path} (training stood still for {pending.stall_s:.2f} s)")
        if dist.get_rank() == 0:
            try:
                for removed in prune(self._directory, self._config.keep_last, self._config.keep_every, step):
                    self._note(f"removed {removed}")
            except OSError as error:
                self._note(f"warning: old checkpoints could not be removed: {error}")

    def close(self) -> None:
        """Complete what is still being written, and hear signals no more. Collective."""
        if self._pending is not None:
            self._finish(must_succeed=True)
        self._signals.restore()
        if self._lock is not None:
            self._lock.close()

    def roll_back(self, guard: LossGuard, counters: Counters, cursor: int) -> Counters:
        """Return to the newest checkpoint, and leave out the samples of the step that began at `cursor`. Collective.

        Raises:
            CheckpointError: there is none to return to.
        """
        if self._pending is not None:
            self._finish(must_succeed=False)
        found = None if self._directory is None else find_checkpoint(self._directory, "auto")
        if found is None:
            raise CheckpointError(
                'mdsp.train.loss_guard.action is "rollback", and there is no checkpoint yet to roll back to; set '
                "mdsp.checkpoint.dir, and mdsp.checkpoint.interval to fewer steps"
            )
        loaded = load_training_checkpoint(self._engine, self._run, found)
        self._saved_step = loaded.step
        self._note(f"rolled back to {found.path}; samples {cursor} to {counters.samples} are left out from now on")
        return guard.rolled_back(loaded, (cursor, counters.samples), counters)


def _beyond(directory: Path, start: int) -> str | None:
    """A warning about another run's checkpoints in the directory, later than the step at which this run starts."""
    later = [path for path in checkpoints_in(directory) if (step_of(path) or 0) > start and is_whole(path)]
    if not later:
        return None
    return (
        f'warning: {later[0]} is of another run, beyond step {start} where this one starts: resume "auto" would '
        f"continue from it, and checkpoints of both runs mix. Remove what is not wanted, or set mdsp.checkpoint.dir to "
        f"another place"
    )
