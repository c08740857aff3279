"""Atomic files, their failures, and waiting for late ones."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import pytest

from mdsp.data.files import PendingFile, wait_for, write_atomically
from mdsp.errors import DataError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with PendingFile(path) as pending:
        pending.write(b"one")
        assert not path.exists()
        pending.commit()
        assert path.read_bytes() == b"one"
    with PendingFile(path) as pending:
        pending.write(b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(path.parent) == ["file"]
    write_atomically(path, b"three")
    assert path.read_bytes() == b"three"


def test_a_file_left_by_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(b"left over, and longer than the new content")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_path_are_refused(tmp_path: Path) -> None:
    with PendingFile(tmp_path / "file") as first:
        first.write(b"first")
        with pytest.raises(DataError, match="being written by another process"):
            PendingFile(tmp_path / "file")
        first.commit()
    assert (tmp_path / "file").read_bytes() == b"first"


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write .*file: File too large"):
            write_atomically(tmp_path / "file", b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_a_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        PendingFile(tmp_path / "blocked" / "file")


def test_waiting_announces_once_and_returns_when_the_file_comes(tmp_path: Path) -> None:
    path = tmp_path / "late"
    heard: list[str] = []
    threading.Timer(0.5, path.touch).start()
    wait_for(path, 60, heard.append)
    assert path.exists()
    assert len(heard) == 1
    assert "late" in heard[0]
    wait_for(path, 0, heard.append)
    assert len(heard) == 1


def test_waiting_ends_with_a_message(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match=r"never is not there after waiting 0\.3 s"):
        wait_for(tmp_path / "never", 0.3)
    assert time.monotonic() - start >= 0.3
    with pytest.raises(DataError, match="never is not there; check the path"):
        wait_for(tmp_path / "never", 0)
