"""Data preparation and sample order against the usual ways, in one run: `python benchmarks/data.py [--documents N]`.

Tokenising: mdsp's whole second reading of a corpus (read, hash, encode, count, write) against a pool of processes that
encodes one document at a time and a parent that writes (the way of Megatron's preprocess_data.py). The text is Python's
standard library; both write the same bytes, which is checked.

Sample order: the first sample of a new epoch, all of the epoch's order included, against the three index arrays of
Megatron's GPTDataset (documents, samples, shuffle) in plain NumPy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mdsp.data.corpus import Skipped, read_documents, stdlib_files
from mdsp.data.indexed import IndexedWriter, token_dtype
from mdsp.data.loader import GlobalBatches
from mdsp.data.order import SampleOrder
from mdsp.data.prepare import PrepareOptions, prepare
from mdsp.data.tokenizer import load_tokenizer
from mdsp.data.tokens import TokenCorpus

VOCABULARY = 8192
REPEATS = 3
_encoder: Tokenizer


def _start_worker(path: Path) -> None:
    global _encoder
    _encoder = load_tokenizer(path, None, False).tokenizer


def _encode(text: str) -> list[int]:
    return _encoder.encode(text, add_special_tokens=False).ids


def pool_prepare(output: Path, tokenizer: Path, workers: int) -> None:
    """Encode document by document in a pool, write in the parent."""
    eod = np.array([load_tokenizer(tokenizer, None, False).end_of_document_id])
    texts = (piece.text for piece in read_documents(stdlib_files(), "text", Skipped()))
    with (
        multiprocessing.get_context("spawn").Pool(workers, _start_worker, (tokenizer,)) as pool,
        IndexedWriter(output, token_dtype(VOCABULARY)) as writer,
    ):
        for ids in pool.imap(_encode, texts, 32):
            writer.append(np.array(ids))
            writer.append(eod)
            writer.end_document()
        writer.commit()


def numpy_order(lengths: np.ndarray, seq_length: int, seed: int) -> None:
    """The documents, samples and shuffle arrays of one epoch."""
    generator = np.random.RandomState(seed)
    documents = np.arange(len(lengths), dtype=np.int32)
    generator.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    n_samples = int(ends[-1] - 1) // seq_length
    begins = np.arange(n_samples + 1, dtype=np.int64) * seq_length
    first = np.searchsorted(ends, begins, side="right")
    samples = np.empty((n_samples + 1, 2), dtype=np.int64)
    samples[:, 0] = first
    samples[:, 1] = begins - (ends[first] - lengths[documents[first]])
    shuffle = np.arange(n_samples, dtype=np.int32)
    generator.shuffle(shuffle)


def best(function: Callable[[], object]) -> float:
    """Shortest of REPEATS runs, in seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def tokenising(directory: Path, workers: int) -> None:
    """Print tokens/s of both ways and their ratio."""
    trained = prepare(PrepareOptions(str(directory / "mdsp"), stdlib=True, train_tokenizer=VOCABULARY))
    tokens = trained.facts.train.tokens
    tokenizer = directory / "mdsp_tokenizer"
    options = PrepareOptions(str(directory / "mdsp"), stdlib=True, tokenizer=str(tokenizer))
    ours = min(prepare(options).seconds for _ in range(REPEATS))
    # The pool's start-up is measured on no text and subtracted: it would not count on a large corpus
    context = multiprocessing.get_context("spawn")

    def start_only() -> None:
        with context.Pool(workers, _start_worker, (tokenizer,)) as pool:
            pool.map(_encode, [""] * workers)

    pooled = best(lambda: pool_prepare(directory / "pool", tokenizer, workers)) - best(start_only)
    for suffix in ("bin", "idx"):
        assert (directory / f"mdsp_train.{suffix}").read_bytes() == (directory / f"pool.{suffix}").read_bytes()
    print(f"tokenising, {tokens:,} tokens, {workers} workers")
    print(f"  mdsp prepare           {tokens / ours:12,.0f} tokens/s")
    print(f"  per document in a pool {tokens / pooled:12,.0f} tokens/s   mdsp / pool {pooled / ours:.2f}")


def ordering(n_documents: int) -> None:
    """Print the seconds of both ways and their ratio."""
    lengths = np.random.default_rng(0).integers(1, 2000, n_documents).astype(np.int32)
    ours = best(lambda: SampleOrder(lengths, 1024, 1).positions([0]))
    reference = best(lambda: numpy_order(lengths, 1024, 1))
    print(f"sample order, {n_documents:,} documents, {int(lengths.sum(dtype=np.int64)):,} tokens, sequence 1,024")
    print(f"  mdsp SampleOrder {ours:.2f} s")
    print(f"  plain NumPy      {reference:.2f} s   mdsp / NumPy {ours / reference:.2f}")


def batching(directory: Path) -> None:
    """Print the time of one rank's micro-batches."""
    corpus = TokenCorpus.open(str(directory / "mdsp_train"))
    batches = GlobalBatches(corpus, SampleOrder(corpus.document_lengths, 1024, 1), 64, 4, 0, 1, 0, True)
    batches.batch(0)
    seconds = best(lambda: [batches.batch(64 * step) for step in range(10)]) / 10
    print(f"batch of 16 micro-batches of 4 x 1,024 tokens: {seconds * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of mdsp's data path.")
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of the sample order")
    arguments = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        tokenising(Path(directory), workers)
        batching(Path(directory))
    ordering(arguments.documents)


if __name__ == "__main__":
    main()
