"""The second reading of a corpus: text to token ids, many documents at once, into the datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from mdsp.data.corpus import Piece
from mdsp.data.indexed import IndexedWriter, Tokens

if TYPE_CHECKING:
    from mdsp.data.tokenizer import CorpusTokenizer

BATCH_CHARACTERS = 2 << 20
"""Text that is tokenised at once; the library keeps some 100 bytes for each of its tokens."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all (0: not known yet)."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def tokenise(
    pieces: Iterable[Piece],
    held_out: NDArray[np.bool_],
    total_bytes: int,
    tokenizer: CorpusTokenizer,
    writers: list[IndexedWriter],
    progress: Progress,
) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Write the tokens of all documents, each followed by the separator.

    Args:
        pieces: The documents in reading order.
        held_out: `[documents]`, which writer each document goes to: `writers[0]` or `writers[1]`.
        total_bytes: Size of the corpus, for `progress`.
        tokenizer: Tokenizer and separator.
        writers: Training, and validation if any document is held out; left uncommitted.
        progress: Told after each batch.

    Returns:
        For each writer, how often each token id occurs `[vocab]`, and the UTF-8 bytes of text. Documents beyond
        `held_out` (a file has grown) are not written.
    """
    separator = np.array([tokenizer.end_of_document_id], dtype=writers[0].dtype)
    counts = [np.zeros(tokenizer.vocab_size, dtype=np.int64) for _ in writers]
    text_bytes = [0 for _ in writers]
    index = 0

    def encode(batch: list[Piece]) -> tuple[list[Piece], list[Tokens]]:
        encodings = tokenizer.tokenizer.encode_batch_fast([p.text for p in batch], add_special_tokens=False)
        return batch, [np.array(e.ids, dtype=separator.dtype) for e in encodings]

    for batch, encoded in _one_ahead(encode, _batches(pieces)):
        written: list[list[Tokens]] = [[] for _ in writers]
        for piece, tokens in zip(batch, encoded, strict=True):
            if index >= len(held_out):
                return counts, text_bytes
            which = int(held_out[index])
            text_bytes[which] += len(piece.text.encode())
            written[which].append(tokens)
            writers[which].append(tokens)
            if piece.ends_document:
                written[which].append(separator)
                writers[which].append(separator)
                writers[which].end_document()
                index += 1
        for count, parts in zip(counts, written, strict=True):
            if parts:
                count += np.bincount(np.concatenate(parts), minlength=len(count))
        progress("tokenising", sum(text_bytes), total_bytes)
    return counts, text_bytes


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """-sum p ln p over the token frequencies p = counts / sum(counts), in nats."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about BATCH_CHARACTERS."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _one_ahead(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Like `map`, with the next result already being computed in a thread while the caller uses the last one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = None
        for item in items:
            following = thread.submit(function, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
