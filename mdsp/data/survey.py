"""The first reading of a corpus: how large it is, what it is, and which documents are held out for validation."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsp.data.corpus import Piece
from mdsp.errors import DataError


@dataclass(frozen=True)
class Survey:
    """What one reading of a corpus found."""

    text_bytes: int
    """UTF-8 bytes of all documents."""
    digests: NDArray[np.uint64]
    """A 64-bit digest of each document's text, `[documents]`, in reading order."""
    source_hash: str
    """Digest of all of it, the order included."""

    @property
    def documents(self) -> int:
        return len(self.digests)


class Surveyor:
    """Takes the pieces of a corpus as they pass by."""

    def __init__(self) -> None:
        self.text_bytes = 0
        self._digests = array.array("Q")
        self._source = hashlib.blake2b(digest_size=16)
        self._document = hashlib.blake2b(digest_size=16)

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pass the pieces on, taking note of them."""
        for piece in pieces:
            data = piece.text.encode()
            self.text_bytes += len(data)
            self._document.update(data)
            if piece.ends_document:
                digest = self._document.digest()
                self._source.update(digest)
                self._digests.append(int.from_bytes(digest[:8], "little"))
                self._document = hashlib.blake2b(digest_size=16)
            yield piece

    def result(self) -> Survey:
        """What has passed by so far."""
        return Survey(self.text_bytes, np.array(self._digests, dtype=np.uint64), self._source.hexdigest())


def hold_out(survey: Survey, fraction: float) -> NDArray[np.bool_]:
    """Which documents `[documents]` are validation documents: about `fraction` of them, at least one.

    A document is held out when its digest is among the smallest: the choice depends on the texts alone, not on their
    order or on the machine, adding documents changes few choices, and two copies of a text are never on both sides.

    Raises:
        DataError: There are fewer than two different documents.
    """
    if not fraction:
        return np.zeros(survey.documents, dtype=np.bool_)
    wanted = max(1, round(fraction * survey.documents))
    threshold = np.partition(survey.digests, wanted - 1)[wanted - 1]
    held_out = survey.digests <= threshold
    if held_out.all():
        # Many copies of one text, or a fraction near 1: fall back on all but the largest digest.
        held_out = survey.digests < survey.digests.max()
    if not held_out.any():
        raise DataError(
            f"--valid-fraction {fraction:g} holds out whole documents, and the corpus has only one (of "
            f"{survey.documents}) that is different; give more documents (one per file or JSON line), or prepare "
            f"training and validation texts separately"
        )
    return held_out
