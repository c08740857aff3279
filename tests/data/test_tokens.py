"""Several datasets as one corpus, and token ids against the model's vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mdsp.data.tokens import TokenCorpus, check_vocabulary
from mdsp.errors import DataError
from tests.data.raw import write_raw


def test_datasets_follow_one_another(tmp_path: Path) -> None:
    prefixes = [
        write_raw(tmp_path / "a", [[1, 2], [3]], code=8),
        write_raw(tmp_path / "empty", [], code=4),
        write_raw(tmp_path / "b", [[100_000, 5, 6]], code=4),
    ]
    corpus = TokenCorpus.open(prefixes)
    assert corpus.document_lengths.tolist() == [2, 1, 3]
    assert (corpus.n_tokens, corpus.n_documents) == (6, 3)
    positions = np.array([[5, 0, 3], [2, 3, 4]])
    assert corpus.gather(positions).tolist() == [[6, 1, 100_000], [3, 100_000, 5]]
    one = TokenCorpus.open(prefixes[0])
    assert one.gather(np.array([2, 0])).tolist() == [3, 1]
    assert one.gather(np.array([2, 0])).dtype == np.int64


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    good = write_raw(tmp_path / "good", [[1, 2]])
    wide = write_raw(tmp_path / "wide", [[7], [70_000, 3]], code=4)
    corpus = TokenCorpus.open([good, wide])
    check_vocabulary(corpus, 70_001)
    with pytest.raises(DataError, match=r"wide\.bin has token ids up to 70000, the model's vocab_size 70000 .* 70001"):
        check_vocabulary(corpus, 70_000)
    negative = TokenCorpus.open(write_raw(tmp_path / "negative", [[7, -2]], code=4))
    with pytest.raises(DataError, match=r"negative\.bin is damaged.*-2"):
        check_vocabulary(negative, 100)


def test_no_prefix_is_refused() -> None:
    with pytest.raises(DataError, match="at least one dataset"):
        TokenCorpus.open([])
