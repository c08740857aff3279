"""Hashes stored tensors while they are being read for another purpose, so that checking them is no second reading."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash
from torch import Tensor

from mdsp.checkpoint.pieces import CHUNK_BYTES, raw_bytes


@dataclass
class _Source:
    data: memoryview
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    done: int = 0
    """So many bytes from the start are in the digest."""

    def update(self, stop: int) -> None:
        self.digest.update(self.data[self.done : stop])
        self.done = stop


class SourceHashes:
    """Hashes of some contiguous tensors, usually views of mapped files; used by one thread.

    A hash needs its bytes in order. What is seen in order is taken at once, while it is in the cache; what is seen in
    another order (a transposed matrix) or not at all (copies on other ranks, vocabulary padding) is read at the end.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sources = [_Source(raw_bytes(tensor.reshape(-1))) for tensor in tensors]
        placed = sorted(zip((tensor.data_ptr() for tensor in tensors), range(len(tensors)), strict=True))
        self._starts = [start for start, _ in placed]
        self._order = [index for _, index in placed]

    def see(self, view: Tensor) -> None:
        """A view that the caller is about to read; of these tensors or of others."""
        start = view.data_ptr()
        place = bisect_right(self._starts, start) - 1
        if place < 0 or not view.is_contiguous():
            return
        source = self._sources[self._order[place]]
        stop = source.done + view.numel() * view.element_size()
        if start == self._starts[place] + source.done and stop <= len(source.data):
            source.update(stop)

    def finish(self) -> list[str]:
        """Read what was not seen; returns the hashes of the tensors."""
        for source in self._sources:
            while source.done < len(source.data):
                source.update(min(source.done + CHUNK_BYTES, len(source.data)))
        return [source.digest.hexdigest() for source in self._sources]
