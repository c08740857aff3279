"""Megatron's indexed dataset: tokens in PREFIX.bin, their boundaries in PREFIX.idx, read and written.

The format is that of megatron-core (`megatron/core/datasets/indexed_dataset.py`), little-endian:

    .bin   the token ids of all sequences, one after the other
    .idx   9 bytes   "MMIDIDX\\0\\0"
           uint64    version, 1
           uint8     code of the token type: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6, 7: floats)
           uint64    S, number of sequences
           uint64    D + 1, where D is the number of documents
           int32[S]  length of each sequence, in tokens
           int64[S]  where each sequence starts in .bin, in bytes
           int64[D+1] the first sequence of each document, then S

This file writes one sequence per document and reads any number of them.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mdsp.data.files import PendingFile, sync_directory, wait_for
from mdsp.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
}
_TOKEN_TYPES[8] = np.dtype("<u2")
_CODES = {dtype: code for code, dtype in _TOKEN_TYPES.items()}
_FLOAT_CODES = (6, 7)
_LONGEST = 2**31 - 1  # lengths are int32

Tokens = NDArray[np.integer]


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """The token type for a vocabulary: uint16 below 65,500 tokens, else int32.

    The limit is megatron-core's, which leaves room below 65,536, so that both tools write the same bytes.
    """
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """PREFIX.bin; a prefix may itself contain dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """PREFIX.idx."""
    return Path(f"{prefix}.idx")


class IndexedWriter:
    """Writes a dataset: `append` tokens, `end_document`, and at last `commit`.

    Until `commit` only temporary files exist, and `PREFIX.idx`, without which there is no dataset, gets its name last.
    Used as a context manager, it discards what was not committed.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[np.integer]) -> None:
        if dtype not in _CODES:
            raise ValueError(f"{dtype} is not a token type of the format")
        self.prefix = str(prefix)
        self.dtype = dtype
        self._limits = np.iinfo(dtype)
        self._bin = PendingFile(bin_path(prefix))
        try:
            self._idx = PendingFile(idx_path(prefix))
        except DataError:
            self._bin.discard()
            raise
        self._lengths = array.array("i")
        self._open_length = 0
        self.n_tokens = 0

    @property
    def n_documents(self) -> int:
        """Documents ended so far."""
        return len(self._lengths)

    def append(self, tokens: Tokens) -> None:
        """Add tokens `[n]` to the document that is being written."""
        if not tokens.size:
            return
        if not np.can_cast(tokens.dtype, self.dtype):
            low, high = int(tokens.min()), int(tokens.max())
            if low < self._limits.min or high > self._limits.max:
                raise DataError(
                    f"{self.prefix}: token ids {low} to {high} do not fit the token type {self.dtype.name} "
                    f"({self._limits.min} to {self._limits.max}); the vocabulary size given for it was too small"
                )
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._open_length += tokens.size
        self.n_tokens += tokens.size

    def end_document(self) -> None:
        """Close the document that is being written; it may be empty."""
        if self._open_length > _LONGEST:
            raise DataError(
                f"{self.prefix}: document {self.n_documents} has {self._open_length} tokens, the format holds at most "
                f"{_LONGEST} in one; split that document"
            )
        self._lengths.append(self._open_length)
        self._open_length = 0

    def commit(self) -> None:
        """Make the dataset visible under its name, replacing an older one; the index is renamed last.

        The older index goes first: it must never be seen beside the new tokens.
        """
        if self._open_length:
            raise ValueError("commit inside a document: call end_document first")
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        pointers = np.zeros(len(lengths), dtype="<i8")
        pointers[1:] = ends[:-1]
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        self._idx.write(_HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(lengths), len(documents)))
        for part in (lengths, pointers, documents):
            self._idx.write(part.data if part.size else b"")
        self._bin.flush()
        self._idx.flush()
        self._idx.path.unlink(missing_ok=True)
        sync_directory(self._idx.path.parent)
        self._bin.commit()
        self._idx.commit()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.discard()
        self._idx.discard()


class IndexedDataset:
    """A dataset on disk, memory-mapped: `tokens` is all of it as one array `[n_tokens]`.

    Args:
        prefix: Path without .bin/.idx.
        wait_seconds: How long to wait for files that are not visible yet.
        announce: Told once when there is something to wait for.

    Raises:
        DataError: A file is missing, damaged, truncated, of another format, or does not belong to the other.
    """

    def __init__(
        self, prefix: str | Path, wait_seconds: float = 0.0, announce: Callable[[str], None] | None = None
    ) -> None:
        self.prefix = str(prefix)
        index, data = idx_path(prefix), bin_path(prefix)
        for path in (index, data):
            wait_for(path, wait_seconds, announce)
        try:
            raw = _map(index)
            self.dtype, lengths, pointers, documents = _parse(index, raw)
            flat = _map(data)
        except OSError as error:
            raise DataError(f"cannot read the dataset {prefix}: {error}; check its permissions") from error
        _check_index(index, self.dtype, lengths, pointers, documents)
        total = int(lengths.sum(dtype=np.int64))
        expected = total * self.dtype.itemsize
        if flat.size != expected:
            state = "truncated" if flat.size < expected else "longer than its index says"
            raise DataError(
                f"{data} is {state}: {flat.size} bytes, {index.name} describes {expected}; the two are not from the "
                f"same run or the copy is incomplete: copy both again, or rerun `mdsp prepare`"
            )
        self.tokens: Tokens = flat.view(self.dtype)
        one_each = len(documents) == len(lengths) + 1 and bool((np.diff(documents) == 1).all())
        if one_each:
            self.document_lengths: Tokens = lengths
        else:
            starts = np.append(pointers // self.dtype.itemsize, total)
            self.document_lengths = np.diff(starts[documents])

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.document_lengths)

    def document(self, index: int) -> Tokens:
        """Tokens `[length]` of one document; linear in `index`, for looking at data and not for training."""
        start = int(self.document_lengths[:index].sum(dtype=np.int64))
        return self.tokens[start : start + int(self.document_lengths[index])]


def _map(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _parse(path: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[np.integer], Tokens, Tokens, Tokens]:
    """Token type, sequence lengths, byte pointers and document starts of an index file."""
    again = "copy it again, or rerun `mdsp prepare`"
    if bytes(raw[: len(MAGIC)]) != MAGIC:
        raise DataError(
            f'{path} is not a Megatron index: it does not start with "MMIDIDX" (older "TNTIDX" datasets have to be '
            f"tokenised anew); give the prefix of a dataset written by `mdsp prepare` or megatron-core"
        )
    if len(raw) < _HEADER.size:
        raise DataError(f"{path} is truncated: {len(raw)} bytes, the header alone has {_HEADER.size}; {again}")
    _, version, code, n_sequences, n_boundaries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if version != VERSION:
        raise DataError(f"{path} has version {version}, only version {VERSION} is known; write it anew")
    if code in _FLOAT_CODES:
        raise DataError(f"{path} holds floating-point numbers (type code {code}), not token ids; give a text dataset")
    if code not in _TOKEN_TYPES:
        known = ", ".join(str(c) for c in _TOKEN_TYPES)
        raise DataError(f"{path} is damaged: token type code {code} is not one of {known}; {again}")
    expected = _HEADER.size + 12 * n_sequences + 8 * n_boundaries
    if len(raw) == expected + n_sequences and n_sequences:
        raise DataError(f"{path} is a multimodal index (it ends in one mode per sequence); give a text dataset")
    if len(raw) != expected:
        state = "truncated" if len(raw) < expected else "damaged"
        raise DataError(
            f"{path} is {state}: {len(raw)} bytes, {n_sequences} sequences and {n_boundaries} document boundaries "
            f"need {expected}; {again}"
        )
    at = _HEADER.size
    lengths = raw[at : at + 4 * n_sequences].view("<i4")
    at += 4 * n_sequences
    pointers = raw[at : at + 8 * n_sequences].view("<i8")
    documents = raw[at + 8 * n_sequences :].view("<i8")
    return _TOKEN_TYPES[code], lengths, pointers, documents


def _check_index(path: Path, dtype: np.dtype[np.integer], lengths: Tokens, pointers: Tokens, documents: Tokens) -> None:
    """Raise DataError unless lengths, pointers and document starts describe one gapless run of tokens."""
    problem = ""
    if len(lengths) and lengths.min() < 0:
        problem = f"sequence {int(lengths.argmin())} has length {int(lengths.min())}"
    elif not len(documents) or documents[0] != 0 or documents[-1] != len(lengths):
        found = f"{documents[0]} to {documents[-1]}" if len(documents) else "nothing"
        problem = f"document boundaries must run from 0 to {len(lengths)}, they run from {found}"
    elif (np.diff(documents) < 0).any():
        problem = f"document {int((np.diff(documents) < 0).argmax())} ends before it starts"
    else:
        ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        wrong = pointers != np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1]])
        if wrong.any():
            problem = f"sequence {int(wrong.argmax())} does not start where the one before it ends"
    if problem:
        raise DataError(f"{path} is damaged: {problem}; copy it again, or rerun `mdsp prepare`")
