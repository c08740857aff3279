"""SampleOrder: which tokens are in global sample i, for any i, from (seed, document lengths, sequence length) alone.

Epoch e of a corpus of T tokens and sequence length s:

1. the documents are shuffled and concatenated to a stream of T tokens;
2. sample j of the stream is its tokens `[j s, j s + s]`: s + 1 tokens, of which neighbours share one, so that each
   token but the last ones is an input once; there are S = (T - 1) // s samples, and the tail is left for another epoch,
   whose stream ends in other documents;
3. the samples are shuffled.

Global sample i is sample i % S of epoch i // S. No file is written and no rank depends on another: the order is the
same at every layout, and on every machine, since the shuffles come from NumPy's frozen generator (RandomState, NEP 19).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsp.data.indexed import Tokens
from mdsp.errors import DataError

Positions = NDArray[np.int64]
_DOCUMENTS, _SAMPLES = 0, 1  # what a generator shuffles


def epoch_permutation(seed: int, epoch: int, what: int, count: int) -> NDArray[np.integer]:
    """A permutation of `range(count)`, int32 where it fits; `what` is 0 for documents, 1 for samples."""
    dtype: type[np.integer] = np.int32 if count <= np.iinfo(np.int32).max else np.int64
    items: NDArray[np.integer] = np.arange(count, dtype=dtype)
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch, what]))
    np.random.RandomState(bits).shuffle(items)
    return items


@dataclass(frozen=True)
class _Epoch:
    number: int
    documents: NDArray[np.integer]
    """Document at each place of the stream, `[D]`."""
    offsets: Positions
    """Where each of them starts in the stream, `[D + 1]`."""
    samples: NDArray[np.integer]
    """Sample of the stream at each place of the epoch, `[S]`."""


class SampleOrder:
    """The order of the samples of a corpus, without end.

    Holds 20 bytes per document and 4 per sample of the current epoch, which is built when it is first asked for.

    Args:
        document_lengths: `[D]`, tokens of each document.
        seq_length: s, predicted tokens per sample.
        seed: Seed of all epochs.
        shuffle: False keeps documents and samples in order (evaluation).
        name: The corpus, for messages.

    Raises:
        DataError: The corpus is shorter than one sample.
    """

    def __init__(
        self, document_lengths: Tokens, seq_length: int, seed: int, shuffle: bool = True, name: str = "the corpus"
    ) -> None:
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self._starts = np.zeros(len(document_lengths) + 1, dtype=np.int64)
        np.cumsum(document_lengths, dtype=np.int64, out=self._starts[1:])
        self.n_tokens = int(self._starts[-1])
        self.samples_per_epoch = (self.n_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            way_out = f"lower data.seq_length to at most {self.n_tokens - 1}, or " if self.n_tokens > 1 else ""
            raise DataError(
                f"{name} has {self.n_tokens} tokens, one sample needs {seq_length + 1} (data.seq_length {seq_length}, "
                f"and one more to predict); {way_out}give more text"
            )
        self._epoch: _Epoch | None = None

    def positions(self, samples: Sequence[int] | Positions) -> Positions:
        """Positions in the corpus `[n, seq_length + 1]` of the tokens of global samples `[n]`, each >= 0."""
        found = np.empty((len(samples), self.seq_length + 1), dtype=np.int64)
        for row, sample in enumerate(samples):
            found[row] = self._sample_positions(int(sample))
        return found

    def epoch_of(self, sample: int) -> int:
        """The epoch that a global sample belongs to."""
        return sample // self.samples_per_epoch

    def _sample_positions(self, sample: int) -> Positions:
        if sample < 0:
            raise ValueError(f"sample {sample} is negative")
        number, place = divmod(sample, self.samples_per_epoch)
        if not self.shuffle:
            first = place * self.seq_length
            return np.arange(first, first + self.seq_length + 1)
        epoch = self._load(number)
        first = int(epoch.samples[place]) * self.seq_length
        last = first + self.seq_length
        # The documents that overlap stream[first : last + 1], and how many of its tokens each of them has
        low = int(np.searchsorted(epoch.offsets, first, side="right")) - 1
        high = int(np.searchsorted(epoch.offsets, last, side="right"))
        bounds: Positions = np.clip(epoch.offsets[low : high + 1], first, last + 1)
        counts: Positions = bounds[1:] - bounds[:-1]
        shifts = self._starts[epoch.documents[low:high]] - epoch.offsets[low:high]
        return np.arange(first, last + 1) + np.repeat(shifts, counts)

    def _load(self, number: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != number:
            self._epoch = None  # both at once would double the memory
            documents = epoch_permutation(self.seed, number, _DOCUMENTS, len(self._starts) - 1)
            offsets = np.zeros(len(documents) + 1, dtype=np.int64)
            np.cumsum(np.diff(self._starts)[documents], out=offsets[1:])
            samples = epoch_permutation(self.seed, number, _SAMPLES, self.samples_per_epoch)
            self._epoch = _Epoch(number, documents, offsets, samples)
        return self._epoch
