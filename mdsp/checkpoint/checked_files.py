"""Files of a checkpoint of training that several threads read: opened once, mapped, compared with their hashes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from mdsp.checkpoint.engine_io import read_file
from mdsp.checkpoint.hashing import file_hash
from mdsp.checkpoint.manifest import StoredFile, stored_path
from mdsp.errors import CheckpointError


class CheckedFiles:
    """Files of `directory`; with `verify`, each is compared with its hash in `stored` before its first use."""

    def __init__(self, directory: Path, stored: tuple[StoredFile, ...], verify: bool) -> None:
        self.directory = directory
        self._hashes = {file.file: file.hash for file in stored}
        self._verify = verify
        self._opened: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def open(self, name: str) -> Any:
        """What the file holds."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._opened:
                if self._verify and file_hash(stored_path(self.directory, name)) != self._hashes.get(name):
                    raise CheckpointError(
                        f"{self.directory / name} does not match its hash; the file is damaged, use another checkpoint"
                    )
                self._opened[name] = self.peek(name)
            return self._opened[name]

    def peek(self, name: str) -> Any:
        """What the file holds, not compared with its hash: for sizes and types, not for values."""
        return read_file(stored_path(self.directory, name), mmap=True)
