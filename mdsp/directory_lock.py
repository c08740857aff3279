"""One job per directory of checkpoints or records: a lock that ends with the process that holds it, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from mdsp.errors import ConfigError

LOCK = ".lock"


class DirectoryLock:
    """Held from its creation until `close`, or the end of the process.

    A POSIX record lock: forked processes do not inherit it, and network file systems pass it on between machines. Where
    the file system knows no locks, nothing is locked.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, directory: Path, key: str) -> None:
        """`key` of the configuration names the directory in the message."""
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(self._descriptor, 256, 0).decode(errors="replace").strip()
            self.close()
            raise ConfigError(
                f"{directory} is in use by another job ({holder}); stop that one, wait for it, or choose another {key}"
            ) from None
        except OSError:
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Give the directory free."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
