"""Files that are either whole or not there: written under a temporary name, renamed last; waited for when late."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mdsp.errors import DataError


class PendingFile:
    """A file that takes its real name only by `commit`.

    Bytes go to `<path>.partial`, which is locked, so that a second writer of the same path is refused, and which the
    next writer of that path overwrites when this process is killed. Leaving the `with` block without `commit` discards
    the file. Every failure of the file system is a DataError that names the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._failure(error) from error
        self._stream = os.fdopen(descriptor, "wb")
        try:
            self._lock(descriptor)
            os.ftruncate(descriptor, 0)
        except DataError:
            self._stream.close()
            raise

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former owner may have renamed the file between our open and our lock: it is then no longer partial.
            locked = os.fstat(descriptor).st_ino == os.stat(self._partial).st_ino
        except (BlockingIOError, FileNotFoundError):
            locked = False
        except OSError:
            locked = True  # a file system without locks: nothing to be had here
        if not locked:
            raise DataError(
                f"{self.path} is being written by another process; wait for it, or choose another output name"
            )

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self._stream.write(data)
        except OSError as error:
            raise self._failure(error) from error

    def commit(self) -> None:
        """Put everything on the disk, then give the file its name, replacing an older one in one step."""
        self.flush()
        try:
            os.replace(self._partial, self.path)
            self._stream.close()
            sync_directory(self.path.parent)
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Put everything written so far on the disk."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        """Remove the temporary file; nothing happens after `commit`."""
        if self._stream.closed:
            return
        self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # buffered bytes that no longer fit on the disk: they are unwanted anyway
            self._stream.close()

    def __enter__(self) -> PendingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _failure(self, error: OSError) -> DataError:
        return DataError(
            f"cannot write {self.path}: {error.strerror or error}; free or choose another place and run the same "
            f"command again, nothing incomplete has been left under that name"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file in one step: readers see the old content or the new, never a part."""
    with PendingFile(path) as pending:
        pending.write(data)
        pending.commit()


def sync_directory(directory: Path) -> None:
    """Put renames and removals in a directory on the disk (Linux needs a sync of the directory itself)."""
    descriptor = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems refuse; they order renames by themselves
        os.fsync(descriptor)
    os.close(descriptor)


def wait_for(path: Path, seconds: float, announce: Callable[[str], None] | None = None) -> None:
    """Return when `path` exists; on network file systems another node's file can be late by seconds.

    Args:
        seconds: Budget; 0 looks once.
        announce: Called once, with one sentence, when there is something to wait for.

    Raises:
        DataError: The file is not there when the budget is spent.
    """
    end = time.monotonic() + seconds
    told = False
    while not path.exists():
        left = end - time.monotonic()
        if left <= 0:
            waited = f" after waiting {seconds:g} s" if seconds else ""
            raise DataError(
                f"{path} is not there{waited}; check the path (prefixes are given without .bin/.idx), that this node "
                f"sees the same file system as the one that wrote it, or make the dataset with `mdsp prepare`"
            )
        if announce is not None and not told:
            announce(f"waiting up to {seconds:g} s for {path} to become visible on this node")
            told = True
        time.sleep(min(0.2, left))
        if path.parent.is_dir():
            os.listdir(path.parent)  # makes NFS look again instead of answering from its cache of missing names
