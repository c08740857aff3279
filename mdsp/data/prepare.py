"""`mdsp prepare`: text in, tokenised training and validation datasets out, with a description beside them."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import mdsp
from mdsp.data.corpus import Skipped, find_files, read_documents, stdlib_files
from mdsp.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from mdsp.data.sidecar import CorpusFacts, SplitFacts, read_sidecar, sidecar_path, write_sidecar
from mdsp.data.survey import Survey, Surveyor, hold_out
from mdsp.data.tokenise import Progress, tokenise, unigram_entropy
from mdsp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mdsp.data.tokenizer import CorpusTokenizer

TOKENIZER_SAMPLE_BYTES = 1 << 30
"""Text that a tokenizer is trained on; beyond it, an evenly chosen sample of the documents."""


@dataclass(frozen=True)
class PrepareOptions:
    """What to read, how to tokenise it, where to write it."""

    output: str
    """Prefix of everything written: PREFIX_train.bin/.idx, PREFIX_valid.bin/.idx, PREFIX.json, PREFIX_tokenizer/."""
    inputs: list[str] = field(default_factory=list)
    """Files, directories, glob patterns."""
    stdlib: bool = False
    """Also read the running Python's standard library."""
    tokenizer: str | None = None
    """Tokenizer directory or tokenizer.json to use."""
    train_tokenizer: int | None = None
    """Or the vocabulary size of one to train."""
    eod_token: str | None = None
    """Token after each document; None lets the tokenizer decide."""
    parse_special_tokens: bool = False
    """Whether the text of a special token inside a document becomes that token."""
    valid_fraction: float = 0.0
    """Fraction of the documents held out."""
    json_key: str = "text"
    """Field of JSON lines that holds the text."""


@dataclass(frozen=True)
class Prepared:
    """What a run has written."""

    facts: CorpusFacts
    skipped: Skipped
    seconds: float
    """Time for tokenising and writing, without training a tokenizer."""
    notes: tuple[str, ...]
    """Things the user should know."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mdsp prepare`."""
    parser.add_argument(
        "inputs", nargs="*", metavar="INPUT", help="text or .jsonl files, .gz of them, directories, globs"
    )
    parser.add_argument("--stdlib", action="store_true", help="also read the sources of Python's standard library")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_train, PREFIX_valid (.bin/.idx) and PREFIX.json",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", metavar="DIR", help="Hugging Face tokenizer directory, or a tokenizer.json")
    which.add_argument(
        "--train-tokenizer", type=int, metavar="VOCAB", help="train a byte-level BPE of this size, in PREFIX_tokenizer"
    )
    parser.add_argument(
        "--valid-fraction", type=float, default=0.0, metavar="F", help="whole documents held out (default: none)"
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="field of JSON lines (default: text)")
    parser.add_argument("--eod-token", metavar="TOKEN", help="after each document (default: <|endoftext|>, else eos)")
    parser.add_argument(
        "--parse-special-tokens", action="store_true", help="text like <|im_start|> in documents becomes that token"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="tokenising threads (default: all CPUs)")


def main(args: argparse.Namespace) -> int:
    """Run `mdsp prepare`."""
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if workers < 1:
        raise ConfigError(f"--workers {workers}: at least 1 thread is needed; leave it out to use all CPUs")
    # The tokenizers library has no other switch for its threads, and reads this one at its first use.
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    options = PrepareOptions(
        output=args.output,
        inputs=args.inputs,
        stdlib=args.stdlib,
        tokenizer=args.tokenizer,
        train_tokenizer=args.train_tokenizer,
        eod_token=args.eod_token,
        parse_special_tokens=args.parse_special_tokens,
        valid_fraction=args.valid_fraction,
        json_key=args.json_key,
    )
    from mdsp.data.prepare_view import print_summary, progress_bar

    with progress_bar() as progress:
        prepared = prepare(options, progress)
    print_summary(options.output, prepared)
    return 0


def prepare(options: PrepareOptions, progress: Progress = lambda what, done, total: None) -> Prepared:
    """Tokenise a corpus; see `PrepareOptions`.

    The corpus is read twice (three times when a tokenizer is trained): first its size and digests, from which the
    validation documents are chosen, then its tokens. Output names appear only when everything has succeeded.

    Raises:
        ConfigError: An option has no legal value.
        DataError: Nothing can be read, the tokenizer cannot be used, the corpus changes meanwhile, the disk is full.
    """
    from mdsp.data.tokenizer import save_tokenizer  # here and below: `--help` does without the tokenizers library

    if not 0 <= options.valid_fraction < 1:
        raise ConfigError(f"--valid-fraction {options.valid_fraction:g} must be at least 0 and below 1, e.g. 0.01")
    if not options.inputs and not options.stdlib:
        raise ConfigError("nothing to read: give text files, directories or patterns, or --stdlib")
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        raise ConfigError("give either --tokenizer DIR or --train-tokenizer VOCAB")
    _check_output(options.output)
    skipped = Skipped()
    files = _without_own_outputs(find_files(options.inputs, skipped), options.output, skipped)
    files += stdlib_files() if options.stdlib else []
    if not files:
        raise DataError(f"no files in {', '.join(options.inputs)} (skipped: {skipped.describe()})")
    surveyor = Surveyor()
    for piece in surveyor.watch(read_documents(files, options.json_key, skipped)):
        if piece.ends_document:
            progress("reading", surveyor.text_bytes, 0)
    survey = surveyor.result()
    if not survey.documents:
        raise DataError(f"no documents in {len(files)} files (skipped: {skipped.describe()}); give UTF-8 text")
    held_out = hold_out(survey, options.valid_fraction)
    notes: list[str] = []
    tokenizer = _tokenizer(options, files, survey, held_out, progress, notes)
    started = time.perf_counter()
    with ExitStack() as stack:
        writers = []
        for is_valid in (False, True) if held_out.any() else (False,):
            writers.append(
                stack.enter_context(IndexedWriter(_prefix(options, is_valid), token_dtype(tokenizer.vocab_size)))
            )
        second = Surveyor()
        pieces = second.watch(read_documents(files, options.json_key, Skipped()))
        counts, text_bytes = tokenise(pieces, held_out, survey.text_bytes, tokenizer, writers, progress)
        if second.result().source_hash != survey.source_hash:
            raise DataError("the corpus was changed while it was being read; run the same command again")
        _remove_previous(options, keep_valid=len(writers) == 2)
        if options.train_tokenizer is not None:
            save_tokenizer(tokenizer)
        for writer in writers:
            writer.commit()
    seconds = time.perf_counter() - started
    splits = [
        SplitFacts(
            name=Path(writer.prefix).name,
            documents=writer.n_documents,
            tokens=writer.n_tokens,
            text_bytes=size,
            max_token_id=int(np.flatnonzero(count)[-1]),
        )
        for writer, count, size in zip(writers, counts, text_bytes, strict=True)
    ]
    facts = CorpusFacts(
        tokenizer=_relative(tokenizer.path, sidecar_path(options.output).parent),
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        end_of_document_id=tokenizer.end_of_document_id,
        unigram_entropy_nats=unigram_entropy(counts[0]),
        train=splits[0],
        valid=splits[1] if len(splits) == 2 else None,
        source_hash=survey.source_hash,
        tokenizer_hash=_tokenizer_hash(tokenizer.path),
        inputs=[*options.inputs, *(["--stdlib"] if options.stdlib else [])],
        skipped=dict(skipped.counts),
        prepared_by={
            "mdsp": mdsp.__version__,
            "tokenizers": importlib.metadata.version("tokenizers"),
            "python": platform.python_version(),
        },
    )
    write_sidecar(options.output, facts)
    return Prepared(facts, skipped, seconds, tuple(notes))


def _check_output(output: str) -> None:
    """Refuse a prefix without a name, and one whose PREFIX.json is somebody else's file."""
    if not Path(output).name or output.endswith(os.sep) or Path(output).is_dir():
        raise ConfigError(
            f"--output {output}: give a prefix, that is, a directory and a name, e.g. {Path(output) / 'text'}"
        )
    if sidecar_path(output).exists():
        try:
            read_sidecar(sidecar_path(output))
        except DataError as error:
            raise DataError(
                f"{sidecar_path(output)} would be overwritten; choose another --output ({error})"
            ) from error


def _without_own_outputs(files: list[Path], output: str, skipped: Skipped) -> list[Path]:
    """Leave out what an earlier run with the same output wrote into an input directory."""
    prefix = os.path.realpath(output)
    own = tuple(f"{prefix}{ending}" for ending in ("_train.", "_valid.", ".json", f"_tokenizer{os.sep}"))
    kept = []
    for file in files:
        if str(file.resolve()).startswith(own):
            skipped.add("output of mdsp prepare", str(file))
        else:
            kept.append(file)
    return kept


def _prefix(options: PrepareOptions, is_valid: bool) -> str:
    return options.output + ("_valid" if is_valid else "_train")


def _tokenizer(
    options: PrepareOptions,
    files: list[Path],
    survey: Survey,
    held_out: NDArray[np.bool_],
    progress: Progress,
    notes: list[str],
) -> CorpusTokenizer:
    """The tokenizer to use: loaded, or trained on the training documents."""
    from mdsp.data.tokenizer import load_tokenizer, train_tokenizer

    if options.tokenizer is not None:
        return load_tokenizer(Path(options.tokenizer), options.eod_token, options.parse_special_tokens)
    assert options.train_tokenizer is not None
    if options.eod_token is not None:
        raise ConfigError("--eod-token chooses a token of an existing --tokenizer; a trained one has <|endoftext|>")
    used = ~held_out
    if survey.text_bytes > TOKENIZER_SAMPLE_BYTES:
        # Validation has the smallest digests; the largest are an even sample of the rest.
        share = TOKENIZER_SAMPLE_BYTES / survey.text_bytes
        used &= survey.digests >= np.uint64(int((1 - share) * 2**64))
        notes.append(f"the tokenizer was trained on {share:.0%} of the documents ({TOKENIZER_SAMPLE_BYTES >> 20} MiB)")

    def texts() -> Iterator[str]:
        done, index = 0, 0
        for piece in read_documents(files, options.json_key, Skipped()):
            if index < len(used) and used[index]:
                done += len(piece.text)
                progress("training the tokenizer", done, survey.text_bytes)
                yield piece.text
            index += piece.ends_document

    found = train_tokenizer(texts(), options.train_tokenizer, Path(f"{options.output}_tokenizer"))
    if found.vocab_size < options.train_tokenizer:
        notes.append(f"the corpus gives a vocabulary of {found.vocab_size}, not {options.train_tokenizer}, tokens")
    return found


def _remove_previous(options: PrepareOptions, keep_valid: bool) -> None:
    """Remove the description and the indices that an earlier run left, and its validation set when this one has none.

    None of them may be seen beside the new tokenizer and tokens: they would describe, or leak, other documents.
    """
    path = sidecar_path(options.output)
    if not path.exists():
        return
    had_valid = read_sidecar(path).valid is not None
    idx_path(_prefix(options, False)).unlink(missing_ok=True)
    if had_valid:
        idx_path(_prefix(options, True)).unlink(missing_ok=True)
    if had_valid and not keep_valid:
        bin_path(_prefix(options, True)).unlink(missing_ok=True)
    path.unlink()


def _relative(path: Path, directory: Path) -> str:
    """`path` relative to `directory` when it lies below it (so that they can be moved together), else absolute."""
    path, directory = path.resolve(), directory.resolve()
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)


def _tokenizer_hash(path: Path) -> str:
    file = path / "tokenizer.json" if path.is_dir() else path
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
