"""An output under construction: a directory beside the final one, and a journal by which a killed run is continued.

Everything is written into `OUT.partial`, which is renamed to `OUT` as the last act: `OUT` is complete or not there.
The journal names what is being made, from what, and which parts are finished with which hashes. A second run of the
same command checks these parts against their hashes and makes the rest; a run of another command is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from mdsp.checkpoint.atomic import sync_directory, write_at
from mdsp.errors import CheckpointError

SUFFIX = ".partial"
JOURNAL = "conversion.jsonl"


def partial_path(out: Path) -> Path:
    """The directory in which `out` is made."""
    return out.with_name(out.name + SUFFIX)


def refuse_partial(path: Path) -> None:
    """Refuse to read a directory that is unfinished, or whose making was begun and not finished.

    Raises:
        CheckpointError: naming the directory and the way out.
    """
    if (path / JOURNAL).exists():
        raise CheckpointError(f"{path} is an unfinished conversion; run the command that began it again to finish it")
    if not path.exists():
        begun = partial_path(path)
        if begun.exists():
            raise CheckpointError(
                f"{path} does not exist: its conversion was begun in {begun} and is unfinished; run the same command "
                f"again to finish it"
            )
        raise CheckpointError(f"{path} does not exist")


def is_occupied(path: Path) -> bool:
    """Whether something is at `path`, an empty directory aside."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def refuse_place(out: Path) -> None:
    """Refuse an output that could not get its name at the end.

    Raises:
        CheckpointError: a link that leads to nothing or to an empty directory, or the current directory.
    """
    if is_occupied(out):
        return
    if out.is_symlink():
        raise CheckpointError(
            f"{out} is a link, which the finished directory cannot replace; name the directory that it leads to "
            f"({out.readlink()}), or another"
        )
    if out.name in ("", ".."):
        raise CheckpointError(f"{out} is a directory in use; name a new one inside it, such as {out / 'converted'}")
    if partial_path(out).exists() and not partial_path(out).is_dir():
        raise CheckpointError(f"{partial_path(out)} is in the way of {out}; remove it, or choose another output")


def plan_hash(plan: dict[str, Any]) -> str:
    """Identifies a conversion by what it makes from what."""
    return xxhash.xxh3_128(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def has_no_journal(out: Path) -> bool:
    """Whether the directory in which `out` is made may be finished, and only lack its final name.

    That is how a kill between the last two acts leaves it.
    """
    path = partial_path(out)
    return path.is_dir() and is_occupied(path) and not (path / JOURNAL).exists()


def give_name(out: Path) -> None:
    """The last act: the finished directory of `out` gets its final name."""
    if out.exists():
        out.rmdir()
    partial_path(out).rename(out)
    sync_directory(out.parent)


class PartialOutput:
    """The directory under construction; a context manager that holds it locked.

    `plan` identifies the work: source, degrees, types. Leaving the context after `finish` renames the directory.
    """

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out = out
        self.path = partial_path(out)
        self.plan = plan
        self.finished: dict[str, Any] = {}
        """Results of parts that an earlier run finished, by name; as recorded, not yet checked."""
        self._lock = threading.Lock()
        self._descriptor = -1

    def __enter__(self) -> PartialOutput:
        if is_occupied(self.out):
            raise CheckpointError(f"{self.out} exists already; choose another output, or remove it")
        self.path.mkdir(parents=True, exist_ok=True)
        journal = self.path / JOURNAL
        if not journal.exists() and any(self.path.iterdir()):
            raise CheckpointError(
                f"{self.path} exists and is no unfinished conversion; remove it, or choose another output"
            )
        self._descriptor = os.open(journal, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._close()
            raise CheckpointError(f"{self.path} is being written by another process; wait for it") from None
        try:
            self._read()
        except BaseException:
            self._close()
            raise
        return self

    def _read(self) -> None:
        text = b""
        while block := os.pread(self._descriptor, 2**20, len(text)):
            text += block
        lines: list[Any] = []
        end = 0
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):  # it was being written when the run was killed
                break
            try:
                lines.append(json.loads(line))
            except ValueError:  # a power failure: what follows is done again
                break
            end += len(line)
        if lines and lines[0] != self.plan:
            raise CheckpointError(
                f"{self.path} is an unfinished conversion of something else ({_difference(lines[0], self.plan)}); "
                f"finish that one, remove the directory, or choose another output"
            )
        if not lines and any(path.name != JOURNAL for path in self.path.iterdir()):
            raise CheckpointError(f"{self.path} has a damaged journal and cannot be continued; remove the directory")
        os.ftruncate(self._descriptor, end)
        self._offset = end
        if not lines:
            self._append(self.plan)
        self.finished = {line["part"]: line["result"] for line in lines[1:]}

    def _append(self, line: Any) -> None:
        data = json.dumps(line).encode() + b"\n"
        write_at(self._descriptor, data, self._offset)
        self._offset += len(data)

    def record(self, part: str, result: Any) -> None:
        """Note that a part is finished."""
        with self._lock:
            self._append({"part": part, "result": result})

    def finish(self) -> None:
        """Everything is written and durable: give the directory its final name."""
        sync_directory(self.path)
        (self.path / JOURNAL).unlink()
        give_name(self.out)

    def discard(self) -> None:
        """Remove the directory: what it was made from cannot be converted."""
        shutil.rmtree(self.path)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _difference(old: Any, new: dict[str, Any]) -> str:
    if not isinstance(old, dict):
        return "its journal is damaged"
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            return f"{key}: {old.get(key)!r} there, {new.get(key)!r} here"
    return "another version"
