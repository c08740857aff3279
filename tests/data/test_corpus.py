"""Finding and reading documents: formats, order, and that nothing is dropped without being counted."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.data import corpus
from mdsp.data.corpus import PIECE, Skipped, cut, find_files, read_documents, stdlib_files
from mdsp.errors import DataError


def texts(files: list[Path], json_key: str = "text", skipped: Skipped | None = None) -> list[str]:
    """Whole documents."""
    found, pending = [], ""
    for piece in read_documents(files, json_key, skipped if skipped is not None else Skipped()):
        pending += piece.text
        if piece.ends_document:
            found.append(pending)
            pending = ""
    assert pending == ""
    return found


def test_formats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Zürich\r\nline two".encode())
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfprint()\n")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "tw\\u00f6", "id": 3}\n')
    (tmp_path / "d.json").write_text('{"text": "three"}\n{"text": "four"}\n')
    (tmp_path / "e.json").write_text('{\n  "name": "a settings file"\n}\n')
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed line"}'))
    skipped = Skipped()
    files = find_files([str(tmp_path)], skipped)
    assert texts(files, skipped=skipped) == [
        "Zürich\r\nline two",
        "print()\n",
        "one",
        "twö",
        "three",
        "four",
        '{\n  "name": "a settings file"\n}\n',
        "packed",
        "packed line",
    ]
    assert skipped.describe() == "none"


def test_json_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "yes", "text": "no"}\n')
    assert texts([path], json_key="body") == ["yes"]


def test_everything_unusable_is_counted_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\xff\xfe")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b" \n\n")
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-20])
    (tmp_path / "late.txt").write_bytes(b"good text " * (PIECE // 5) + b"\xff")
    (tmp_path / "lines.jsonl").write_bytes(
        b'{"text": "good"}\n{"text": ""}\n{"text": 3}\n["text"]\n{"text": "cut\n{"other": 1}\n'
        b'{"text": "\xff"}\n{"text": "half \\ud800"}\n' + b"[" * 100_000 + b"\n"
    )
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_text("hidden")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    skipped = Skipped()
    assert texts(find_files([str(tmp_path)], skipped), skipped=skipped) == ["good"]
    assert skipped.counts == {
        "hidden": 2,
        "not a regular file": 2,
        "binary": 1,
        "not UTF-8": 3,
        "empty": 3,
        "unreadable or damaged gzip": 1,
        'without a text field "text"': 3,
        "not JSON": 2,
        "with half a surrogate pair": 1,
    }
    description = skipped.describe()
    assert "lines.jsonl:2" in description
    assert "latin1.txt" in description


def test_sorted_once_each_and_independent_of_creation_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/9.txt", "b/10.txt", "c.txt", "a/x/1.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path)
    skipped = Skipped()
    files = find_files([str(tmp_path / "b"), str(tmp_path), str(tmp_path / "*.txt")], skipped)
    names = [file.relative_to(tmp_path).as_posix() for file in files]
    assert names == ["b/10.txt", "b/2.txt", "c.txt", "a/9.txt", "a/x/1.txt"]
    assert skipped.counts["given twice"] == 3


@pytest.mark.parametrize(
    ("given_input", "message"), [("nothing.txt", "does not exist"), ("*.nothing", "pattern matches nothing")]
)
def test_inputs_that_are_not_there(tmp_path: Path, given_input: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_files([str(tmp_path / given_input)], Skipped())


def test_a_pipe_as_input_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a directory"):
        find_files([str(tmp_path / "pipe")], Skipped())


def test_the_standard_library_is_real_text_in_a_fixed_order() -> None:
    files = stdlib_files()
    names = [file.as_posix() for file in files]
    assert names == sorted(names)
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any(part in name for name in names for part in ("site-packages", "/test/", "/idlelib/"))
    assert sum(file.stat().st_size for file in files) > 5_000_000


def test_long_documents_come_in_pieces(tmp_path: Path) -> None:
    line = "some words and 17 numbers, again and again\n"
    text = line * (5 * PIECE // len(line))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(read_documents([tmp_path / "long.txt"], "text", Skipped()))
    assert len(pieces) >= 3
    assert [p.ends_document for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(p.text) for p in pieces) <= 2 * PIECE
    assert "".join(p.text for p in pieces) == text
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}))
    assert texts([tmp_path / "long.jsonl"]) == [text]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab1 \n.é", max_size=40), max_size=8))
def test_cutting_loses_nothing_and_bounds_the_pieces(blocks: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", 10)
        pieces = list(cut(blocks, "test"))
    assert "".join(p.text for p in pieces) == "".join(blocks)
    assert all(0 < len(p.text) <= 20 for p in pieces[:-1])
    assert len(pieces[-1].text) <= 20
    assert [p.ends_document for p in pieces] == [False] * (len(pieces) - 1) + [True]
