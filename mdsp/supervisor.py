"""Supervisor: every rank's parent process, which outlives it and says how it died.

    launcher -> supervisor of rank 3 -> rank 3

A rank that is killed (by the kernel for want of memory, by an operator) cannot report it, and its peers only see that a
connection closed. The supervisor imports nothing heavy, waits, and tells: one message per job, naming the rank, its exit
status or signal, and its log. It then ends the other ranks of its host within seconds, whatever they are blocked in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
POLL_S = 0.05
LAST_WORDS_S = 1.0
"""Seconds that a failed rank leaves to others that know better: a peer's death is the cause of most failures."""
GRACE_S = 2.0
"""Seconds that ranks have to end by themselves once one has failed."""
_PR_SET_PDEATHSIG = 1


class Supervisor:
    """Forks the rank. In the rank, `last_words` carries its own account of a failure to the supervisor."""

    def __init__(self, rank: int, directory: Path, log: Path, errors: TextIO) -> None:
        """
        Args:
            rank: the rank.
            directory: where the supervisors of this host meet.
            log: the rank's log file, for the message.
            errors: where the message goes.
        """
        self._rank = rank
        self._log = log
        self._errors = errors
        # Ranks of one job and host have one launcher: its process tells jobs apart that share the directory.
        self._failure = directory / f".failure-{socket.gethostname()}-{os.getppid()}"
        self._read, self._write = -1, -1

    def run(self, work: Callable[[Callable[[str], None]], int]) -> int:
        """`work(last_words)` in a child process; its exit code, or 128 + the signal that it died of."""
        self._failure.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            if time.time() - self._failure.stat().st_mtime > 60:
                self._failure.unlink()  # an earlier job's, whose launcher had the same number
        self._read, self._write = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(self._read)
            _die_with(parent)
            return work(self._say)
        os.close(self._write)
        with _forwarding(child):
            status = self._wait(child)
        return self._judge(status)

    def _say(self, message: str) -> None:
        """Called in the rank: why it is about to fail."""
        with contextlib.suppress(OSError):
            os.write(self._write, message.encode()[:60000])
            os.close(self._write)

    def _wait(self, child: int) -> int:
        """Exit status of the rank; when another rank of this host fails, it is ended after a moment."""
        deadline: float | None = None
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if deadline is None and self._failure.exists():
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_S)

    def _judge(self, status: int) -> int:
        with os.fdopen(self._read, "rb") as pipe:
            words = pipe.read().decode(errors="replace")
        if status == 0:
            return 0
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (by the kernel for want of memory?)" if -status == signal.SIGKILL else ""
            words = f"rank {self._rank} was killed by {name}{hint}; its log is {self._log}"
        elif not words:
            words = f"rank {self._rank} exited with status {status}; its log is {self._log}"
        else:
            deadline = time.monotonic() + LAST_WORDS_S
            while time.monotonic() < deadline and not self._failure.exists():
                time.sleep(POLL_S)
        if self._is_first():
            print(f"mdsp: error: {words}", file=self._errors, flush=True)
        return status if status > 0 else 128 - status

    def _is_first(self) -> bool:
        """Whether nobody on this host has spoken for this job yet."""
        try:
            os.close(os.open(self._failure, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:
            return True  # a full disk must not silence the message
        return True


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no rank outlives its job (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that took effect
        os._exit(1)


@contextlib.contextmanager
def _forwarding(child: int) -> Iterator[None]:
    """Signals to this process go to the rank. SIGINT does not: a terminal sends it to both."""

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
