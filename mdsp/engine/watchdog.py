"""Watchdog: a step that does not end is reported by every rank, explained in one table, and ends the job.

A thread of every rank looks at what its rank is doing. When a step exceeds its budget, each rank writes down the
instruction it is in, whom it waits for and its stack; the lowest rank that still can reads all of that and names the
likely culprit, and all exit with a failure, long before communication would time out. The ranks meet in files, because
a hung job's communicators are no help: the directory must be one that all ranks see.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from mdsp.checkpoint.atomic import write_atomic
from mdsp.config.run_config import RunConfig
from mdsp.config.schema import WatchdogConfig
from mdsp.engine.engine import Progress
from mdsp.engine.hang_report import RankReport, hang_table
from mdsp.rank_output import log_path
from mdsp.topology import Topology

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine

EXIT_CODE = 1
POLL_S = 0.5
"""Seconds between looks."""
GRACE_S = 4.0
"""Seconds that the others have for their reports."""
COMMUNICATION = ("torch/distributed/", "deepspeed/comm/", "tensor_parallel/collectives")
"""Files whose frames at the top of a stack mean that the rank waits for others."""


@dataclass(frozen=True)
class _Presence:
    """How a rank can be found by another on the same host."""

    host: str
    pid: int


def watch(engine: MdspEngine, run: RunConfig, rank: int, say: Callable[[str, bool], None]) -> Watchdog:
    """The watchdog of a rank. Collective: the ranks meet in a directory that rank 0 has cleared."""
    directory = Path(run.mdsp.monitor.dir)
    meeting = directory / "watchdog"
    if rank == 0:
        shutil.rmtree(meeting, ignore_errors=True)
    dist.barrier()
    topology = Topology(run.layout.tensor, run.layout.pipeline, run.layout.data)
    config = run.mdsp.train.watchdog
    return Watchdog(engine.progress, config, topology, rank, meeting, lambda other: log_path(directory, other), say)


class Watchdog:
    """Watches one rank: `begin_step` before each step, `end_step` after it, `close` when nothing more is to come."""

    def __init__(
        self,
        progress: Progress,
        config: WatchdogConfig,
        topology: Topology,
        rank: int,
        directory: Path,
        log: Callable[[int], Path],
        say: Callable[[str, bool], None],
    ) -> None:
        """
        Args:
            progress: what the engine is doing.
            config: budgets.
            topology: who waits for whom.
            rank: this rank.
            directory: where the ranks meet; of this job alone.
            log: the log file of a rank.
            say: takes the table to the terminal; see `mdsp.supervisor`.
        """
        self._progress = progress
        self._config = config
        self._topology = topology
        self._rank = rank
        self._directory = directory
        self._log = log
        self._say = say
        self._durations: deque[float] = deque(maxlen=101)
        self._started = time.monotonic()
        self._in_step = False
        self._step = 0
        self._main = threading.main_thread().ident
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if config.factor > 0:
            directory.mkdir(parents=True, exist_ok=True)
            presence = _Presence(socket.gethostname(), os.getpid())
            write_atomic(self._presence_path(rank), json.dumps(asdict(presence)).encode())
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    @property
    def budget_s(self) -> float:
        """Seconds that the current step, or what lies between two, may take."""
        if not self._in_step or not self._durations:
            return max(self._config.first_step, self._config.minimum)
        return max(self._config.minimum, self._config.factor * statistics.median(self._durations))

    def begin_step(self, step: int) -> None:
        """A step begins; `step` counts from 1."""
        self._step = step
        self._started, self._in_step = time.monotonic(), True

    def end_step(self) -> None:
        """It is over."""
        now = time.monotonic()
        self._durations.append(now - self._started)
        self._started, self._in_step = now, False

    def close(self) -> None:
        """Watch no more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._presence_path(self._rank).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the last rank to close removes the place
                self._directory.rmdir()

    @property
    def _alarm(self) -> Path:
        return self._directory / "alarm"

    def _report_path(self, rank: int) -> Path:
        return self._directory / f"rank_{rank:04d}.json"

    def _presence_path(self, rank: int) -> Path:
        return self._directory / f"rank_{rank:04d}.alive"

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            # Two fields that another thread sets: read in the other order, a long pause would count as a step.
            budget, elapsed = self.budget_s, time.monotonic() - self._started
            if elapsed > budget or self._alarm.exists():
                self._raise_alarm(elapsed)

    def _raise_alarm(self, elapsed_s: float) -> NoReturn:
        """Report, let the lowest rank that reports explain, and end."""
        try:
            self._alarm.touch()
            report = self.report(elapsed_s)
            write_atomic(self._report_path(self._rank), json.dumps(asdict(report)).encode())
            deadline = time.monotonic() + GRACE_S
            ranks = range(self._topology.world_size)
            while time.monotonic() < deadline and not all(self._report_path(rank).exists() for rank in ranks):
                time.sleep(0.1)
            found = self._reports()
            if self._rank == min(found):
                what = f"step {self._step}" if self._in_step else f"what follows step {self._step}"
                message = hang_table(found, self._missing(found), self._topology, what, self.budget_s, self._log)
                print(message, flush=True)
                self._say(message, True)
                time.sleep(POLL_S)  # it must be out before the deaths that follow are noticed
                (self._directory / "explained").touch()
                self._kill_silent(found)
            else:
                deadline = time.monotonic() + GRACE_S
                while time.monotonic() < deadline and not (self._directory / "explained").exists():
                    time.sleep(0.1)
            sys.stdout.flush()
        finally:
            os._exit(EXIT_CODE)  # the main thread is blocked in a call that nothing can interrupt

    def report(self, elapsed_s: float) -> RankReport:
        """What this rank is doing now."""
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.format_stack(frame) if frame is not None else []
        kind, micro_batch = self._progress.kind, self._progress.micro_batch
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            elapsed_s=elapsed_s,
            instruction=kind,
            micro_batch=micro_batch,
            instruction_s=time.monotonic() - self._progress.since if kind is not None else 0.0,
            communicating=_is_communicating(frame),
            stack=[line.rstrip() for line in stack],
        )

    def _reports(self) -> dict[int, RankReport]:
        found = {}
        for rank in range(self._topology.world_size):
            try:
                found[rank] = RankReport(**json.loads(self._report_path(rank).read_bytes()))
            except (OSError, ValueError, TypeError):
                continue
        return found

    def _presence(self, rank: int) -> _Presence | None:
        try:
            return _Presence(**json.loads(self._presence_path(rank).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _missing(self, found: dict[int, RankReport]) -> dict[int, str]:
        """What can be said about the ranks that did not report."""
        missing = {}
        for rank in range(self._topology.world_size):
            if rank in found:
                continue
            presence = self._presence(rank)
            if presence is None:
                missing[rank] = "never started, or already gone"
            elif presence.host != socket.gethostname():
                missing[rank] = f"does not answer (process {presence.pid} on {presence.host})"
            else:
                missing[rank] = process_state(presence.pid)
        return missing

    def _kill_silent(self, found: dict[int, RankReport]) -> None:
        """A stopped process would outlive the job: no launcher's SIGTERM reaches it."""
        for rank in range(self._topology.world_size):
            presence = self._presence(rank)
            if rank not in found and presence is not None and presence.host == socket.gethostname():
                try:
                    os.kill(presence.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _is_communicating(frame: FrameType | None) -> bool:
    depth = 0
    while frame is not None and depth < 6:
        if any(part in frame.f_code.co_filename for part in COMMUNICATION):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def process_state(pid: int) -> str:
    """What the system says about a process of this host, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"process {pid} does not exist any more"
    letter = text.rpartition(")")[2].split()[0]
    words = {
        "T": "is stopped (SIGSTOP)",
        "t": "is stopped by a debugger",
        "Z": "has died",
        "D": "waits for a disk or network file system",
    }
    return f"process {pid} {words.get(letter, 'runs, but does not answer')}"
