"""Documents of a corpus, streamed from text files, JSON lines, directories, globs and gzip; nothing dropped unseen.

One text file is one document; one line of a .jsonl (.ndjson) file is one document, its text in the field `json_key`.
Long documents come in pieces, so that memory stays small whatever the file size.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from mdsp.errors import DataError

PIECE = 1 << 20
"""Characters after which a document is cut at the next suitable line end."""

# A line end between a letter or digit and a visible character. Byte-level pre-tokenizers (GPT-2's, Llama 3's, Qwen's)
# start a new word there whatever follows or precedes, so that the pieces have the same tokens as the whole.
_LINE_END = re.compile(r"(?<=[^\W_])\n(?=\S)")
_SPACE = re.compile(r"(?<=[^\W_]) (?=[^\W\d_])")
_JSON_LINES = (".jsonl", ".ndjson")
_STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"}
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document: text, whether the document ends with it, and the file (and line) that it is from."""

    text: str
    ends_document: bool
    source: str


@dataclass
class Skipped:
    """What was not used, and why: a count for each reason, and the first few places."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count one file, line or document."""
        self.counts[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < 3:
            places.append(where)

    def describe(self) -> str:
        """`2 empty (a.txt, b.txt), 1 not UTF-8 (c.bin)`, or `none`."""
        if not self.counts:
            return "none"
        parts = []
        for reason, count in self.counts.most_common():
            places = self.examples[reason]
            more = ", ..." if count > len(places) else ""
            parts.append(f"{count} {reason} ({', '.join(places)}{more})")
        return "; ".join(parts)


def find_files(inputs: Sequence[str], skipped: Skipped) -> list[Path]:
    """The files that `inputs` (files, directories, glob patterns) stand for, sorted within each input, each file once.

    Directories are walked recursively, without following links to directories; hidden entries and `__pycache__` are
    skipped and counted.

    Raises:
        DataError: An input does not exist, or a pattern matches nothing.
    """
    found: dict[Path, Path] = {}
    for given in inputs:
        matches = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))
        if not matches:
            what = "pattern matches nothing" if glob.has_magic(given) else "file or directory does not exist"
            raise DataError(f"input '{given}': the {what}; check the path")
        for match in matches:
            path = Path(match)
            if not path.is_dir() and not path.is_file():
                raise DataError(f"input '{match}' is neither a file nor a directory; texts are read twice, so save it")
            for file in _walk(path, skipped) if path.is_dir() else [path]:
                if found.setdefault(file.resolve(), file) is not file:
                    skipped.add("given twice", str(file))
    return list(found.values())


def _walk(directory: Path, skipped: Skipped) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        skipped.add("unreadable", str(error.filename))

    for root, directories, files in os.walk(directory, onerror=unreadable):
        for name in sorted([*directories, *files]):
            if name.startswith(".") or name == "__pycache__":
                skipped.add("hidden", str(Path(root, name)))
        directories[:] = sorted(d for d in directories if not d.startswith(".") and d != "__pycache__")
        for file in (Path(root, name) for name in sorted(files) if not name.startswith(".")):
            if file.is_file():
                yield file
            else:
                skipped.add("not a regular file", str(file))


def stdlib_files() -> list[Path]:
    """Sources of the running Python's standard library, sorted: real text that is on every machine.

    Tests, IDLE, demos, bundled copies and installed packages are left out.

    Raises:
        DataError: This Python has no library sources on disk (embedded in a zip file).
    """
    root = Path(sysconfig.get_path("stdlib"))
    relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [name for name in relative if not _STDLIB_LEFT_OUT.intersection(name.split("/")[:-1])]
    if not kept:
        raise DataError(f"the running Python has no standard library sources in {root}; give text files instead")
    return [root / name for name in kept]


def read_documents(files: Sequence[Path], json_key: str, skipped: Skipped) -> Iterator[Piece]:
    """The documents of `files` in order, in pieces; what cannot be used is counted in `skipped`.

    Only documents that can be used whole yield anything: long files are checked before their first piece.
    """
    for path in files:
        try:
            if _is_json_lines(path, json_key):
                yield from _read_lines(path, json_key, skipped)
            else:
                yield from _read_text(path, skipped)
        except (OSError, EOFError, zlib.error) as error:
            # gzip reports damage as OSError (BadGzipFile), EOFError or zlib.error
            reason = "unreadable" if not str(path).endswith(".gz") else "unreadable or damaged gzip"
            skipped.add(reason, f"{path}: {error}")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _is_json_lines(path: Path, json_key: str) -> bool:
    """By name; a .json file counts when its first line is a complete object with the field."""
    name = path.name.removesuffix(".gz")
    if name.endswith(_JSON_LINES):
        return True
    if not name.endswith(".json"):
        return False
    with _open(path) as stream:
        try:
            first = json.loads(stream.readline())
        except (ValueError, RecursionError):
            return False
    return isinstance(first, dict) and json_key in first


def _read_lines(path: Path, json_key: str, skipped: Skipped) -> Iterator[Piece]:
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except UnicodeDecodeError:
                skipped.add("not UTF-8", where)
                continue
            except (ValueError, RecursionError):
                skipped.add("not JSON", where)
                continue
            text = record.get(json_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                skipped.add(f'without a text field "{json_key}"', where)
            elif not text or text.isspace():
                skipped.add("empty", where)
            elif not _is_unicode(text):
                skipped.add("with half a surrogate pair", where)
            else:
                yield from cut([text], where)


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded: JSON may escape one half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_text(path: Path, skipped: Skipped) -> Iterator[Piece]:
    with _open(path) as stream:
        head = stream.read(PIECE)
        rest = stream.read(1)
    try:
        if not rest:
            text = head.decode("utf-8-sig")
            visible = bool(text) and not text.isspace()
            blocks: Iterable[str] = [text]
        else:
            # Decoded twice rather than held: the first pass only says whether the file can be used.
            visible = False
            for block in _decode(path):
                visible = visible or not block.isspace()
            blocks = _decode(path)
    except UnicodeDecodeError:
        skipped.add("binary" if b"\0" in head else "not UTF-8", str(path))
        return
    if not visible:
        skipped.add("empty", str(path))
    else:
        yield from cut(blocks, str(path))


def _decode(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with _open(path) as stream:
        while block := stream.read(PIECE):
            yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def cut(blocks: Iterable[str], source: str) -> Iterator[Piece]:
    """Join the blocks of one document and cut them anew, where tokens do not change, into pieces of 1 to 2 `PIECE`."""
    pending, start = "", 0
    for block in blocks:
        pending, start = pending[start:] + block, 0
        while len(pending) - start > 2 * PIECE:
            window = start + PIECE, start + 2 * PIECE
            match = _LINE_END.search(pending, *window) or _SPACE.search(pending, *window)
            end = match.start() if match else window[1]  # a megabyte without a word: one token may change here
            yield Piece(pending[start:end], False, source)
            start = end
    yield Piece(pending[start:], True, source)
