"""The tokens of one or several datasets as one corpus, addressed by position, and its check against a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mdsp.data.indexed import IndexedDataset, Tokens, bin_path
from mdsp.data.sidecar import split_facts
from mdsp.errors import DataError

_SCAN = 1 << 24  # tokens looked at in one go


class TokenCorpus:
    """Datasets read one after the other.

    A token's position is its index in the concatenation of all documents of all datasets, in the order given.
    """

    def __init__(self, datasets: Sequence[IndexedDataset]) -> None:
        if not datasets:
            raise DataError("a corpus needs at least one dataset; give the prefixes that `mdsp prepare` printed")
        self.datasets = tuple(datasets)
        self.document_lengths: Tokens = (
            datasets[0].document_lengths
            if len(datasets) == 1
            else np.concatenate([d.document_lengths for d in datasets]).astype(np.int64, copy=False)
        )
        self._starts = np.cumsum([0, *(d.n_tokens for d in datasets)], dtype=np.int64)

    @classmethod
    def open(
        cls, prefixes: str | Sequence[str], wait_seconds: float = 0.0, announce: Callable[[str], None] | None = None
    ) -> TokenCorpus:
        """Open one prefix or several (`data.train`, `data.valid`).

        Raises:
            DataError: A dataset is missing (after `wait_seconds`) or damaged.
        """
        names = [prefixes] if isinstance(prefixes, str) else prefixes
        return cls([IndexedDataset(name, wait_seconds, announce) for name in names])

    @property
    def name(self) -> str:
        """The prefixes, for messages."""
        return ", ".join(d.prefix for d in self.datasets)

    @property
    def n_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def n_documents(self) -> int:
        return len(self.document_lengths)

    def gather(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at `positions` (any shape), as int64."""
        if len(self.datasets) == 1:
            return self.datasets[0].tokens[positions].astype(np.int64)
        found = np.empty(positions.shape, dtype=np.int64)
        owner = np.searchsorted(self._starts, positions, side="right") - 1
        for index in np.unique(owner):
            mine = owner == index
            found[mine] = self.datasets[index].tokens[positions[mine] - self._starts[index]]
        return found


def check_vocabulary(corpus: TokenCorpus, vocab_size: int) -> None:
    """Raise DataError unless every token id is in `[0, vocab_size)`, naming the dataset and the ids.

    Costs nothing where the token type or the description written by `mdsp prepare` settles it; otherwise the dataset
    is read through once, so one rank should do it for all.
    """
    for dataset in corpus.datasets:
        limits = np.iinfo(dataset.dtype)
        if limits.min >= 0 and limits.max < vocab_size:
            continue
        facts = split_facts(dataset.prefix)
        if facts is not None and facts.tokens == dataset.n_tokens:
            low, high = 0, facts.max_token_id
        else:
            low, high = _extremes(dataset.tokens)
        path = bin_path(dataset.prefix)
        if low < 0:
            raise DataError(f"{path} is damaged: it has a negative token id, {low}; copy it again")
        if high >= vocab_size:
            raise DataError(
                f"{path} has token ids up to {high}, the model's vocab_size {vocab_size} allows 0 to {vocab_size - 1}; "
                f"set vocab_size to at least {high + 1}, or tokenise with the model's own tokenizer: "
                f"mdsp prepare --tokenizer DIR"
            )


def _extremes(tokens: Tokens) -> tuple[int, int]:
    """Smallest and largest token id; (0, -1) without tokens."""
    low, high = 0, -1
    for start in range(0, len(tokens), _SCAN):
        part = tokens[start : start + _SCAN]
        low, high = min(low, int(part.min())), max(high, int(part.max()))
    return low, high
