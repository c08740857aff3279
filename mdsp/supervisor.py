"""Supervisor: every rank's parent process, which outlives it and says how it died.

    launcher -> supervisor of rank 3 -> rank 3

A rank that is killed (by the kernel for want of memory, by an operator) cannot report it, and its peers only see that a
connection closed. The supervisor imports nothing heavy, waits, and tells: one message per job, naming the rank, its
exit status or signal, and its log. It then ends the other ranks of its host within seconds, whatever blocks them.
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
STALE_S = 60.0
"""Age from which a failure is an earlier job's, whose launcher had the same process number."""
CERTAIN = b"\0"
"""Ends an account that needs no better one."""
_PR_SET_PDEATHSIG = 1


Say = Callable[[str, bool], None]
"""(message, certain): a rank's own account of why it fails. Not certain: a peer's death would explain it better."""


class Supervisor:
    """Forks the rank, waits for it, and speaks for it."""

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
        self._words = b""
        self._deadline: float | None = None

    def run(self, work: Callable[[Say], int]) -> int:
        """`work(say)` in a child process; its exit code, or 128 + the signal that it died of."""
        self._failure.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self._log.touch()  # there is a log to look at, however early the rank dies
        self._forget_earlier_jobs()
        read, write = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            _die_with(parent)
            return work(lambda message, certain: _say(write, message, certain))
        os.close(write)
        with _forwarding(child):
            status = self._wait(child, read)
        os.close(read)
        return self._judge(status)

    def _forget_earlier_jobs(self) -> None:
        """Remove what failed jobs left, whose launchers are gone or had the number that ours has now."""
        prefix = self._failure.name.rpartition("-")[0]
        for path in self._failure.parent.glob(f"{prefix}-*"):
            with contextlib.suppress(OSError, ValueError):
                if path == self._failure:
                    if time.time() - path.stat().st_mtime > STALE_S:
                        path.unlink()
                elif not Path(f"/proc/{int(path.name.rpartition('-')[2])}").exists():
                    path.unlink()

    def _wait(self, child: int, pipe: int) -> int:
        """Exit status of the rank; once it or another rank of this host has failed, it is ended after a moment."""
        os.set_blocking(pipe, False)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            with contextlib.suppress(BlockingIOError):
                self._words += os.read(pipe, 1 << 16)
            if self._words.endswith(CERTAIN):
                self._speak(self._words.removesuffix(CERTAIN).decode(errors="replace"))
            if done:
                return os.waitstatus_to_exitcode(status)
            if self._deadline is None and (self._words or self._failure.exists()):
                self._deadline = time.monotonic() + GRACE_S
            if self._deadline is not None and time.monotonic() > self._deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_S)

    def _judge(self, status: int) -> int:
        words = self._words.removesuffix(CERTAIN).decode(errors="replace")
        if status == 0:
            return 0
        if status < 0 and not self._words:
            name = signal.Signals(-status).name
            hint = " (by the kernel for want of memory?)" if -status == signal.SIGKILL else ""
            self._speak(f"rank {self._rank} was killed by {name}{hint}; its log is {self._log}")
        elif not self._words.endswith(CERTAIN):
            deadline = time.monotonic() + (LAST_WORDS_S if words else 2 * LAST_WORDS_S)
            while time.monotonic() < deadline and not self._failure.exists():
                time.sleep(POLL_S)
            self._speak(words or f"rank {self._rank} exited with status {status}; its log is {self._log}")
        return status if status > 0 else 128 - status

    def _speak(self, message: str) -> None:
        """Print the message of the job, unless another rank of this host has."""
        try:
            os.close(os.open(self._failure, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return
        except OSError:
            pass  # a full disk must not silence the message
        print(f"mdsp: error: {message}", file=self._errors, flush=True)


def _say(pipe: int, message: str, certain: bool) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(pipe, message.encode()[:60000] + (CERTAIN if certain else b""))


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
