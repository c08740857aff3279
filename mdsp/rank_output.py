"""Where a rank's output goes: everything into its own log file, and only what matters to the terminal, once."""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mdsp.errors import MdspError


@dataclass(frozen=True)
class Place:
    """What the launcher says about this process."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int


def log_path(directory: Path, rank: int) -> Path:
    """The log file of a rank."""
    return directory / "logs" / f"rank_{rank:04d}.log"


class RankOutput:
    """Sends standard output and error of this process, those of libraries included, to a log file.

    `terminal` still reaches what was standard output; only rank 0 should write to it.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self.path = log_path(directory, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.terminal: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        self.errors: TextIO = os.fdopen(os.dup(2), "w", buffering=1)
        log = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def failure(self, error: BaseException) -> tuple[str, bool, int]:
        """(message, whether it says all, exit code) for the error that ends this rank; tracebacks go to the log."""
        if isinstance(error, MdspError):
            return str(error), True, error.exit_code
        traceback.print_exception(error)
        sys.stderr.flush()
        text = str(error).splitlines()[0] if str(error) else "no message"
        return f"rank {self.rank}: {type(error).__name__}: {text}; the traceback is in {self.path}", False, 1


def report_once(message: str, exit_code: int, rank: int, errors: TextIO) -> int:
    """Print an error that several ranks may have met, once, and return `exit_code`.

    Rank 0 prints at once and exits, upon which the launcher ends the others. These wait for that; when it does not
    come, rank 0 is not among those that failed, and the first of them speaks.
    """
    if rank:
        time.sleep(min(2.0 + 1.5 * rank, 30.0))
    print(f"mdsp: error: {message}", file=errors, flush=True)
    return exit_code
