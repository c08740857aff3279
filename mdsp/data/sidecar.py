"""PREFIX.json: what `mdsp prepare` knows about a tokenised corpus and the .bin/.idx pairs cannot say."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from mdsp.data.files import write_atomically
from mdsp.errors import DataError
from mdsp.model.config import Frozen


class SplitFacts(Frozen):
    """One tokenised dataset."""

    name: str
    """File name of its prefix, beside the sidecar."""
    documents: int
    """Documents."""
    tokens: int
    """Tokens, separators included."""
    text_bytes: int
    """UTF-8 bytes of text."""
    max_token_id: int
    """Largest token id that occurs."""


class CorpusFacts(Frozen):
    """A tokenised corpus."""

    format: int = 1
    """Version of this file."""
    tokenizer: str
    """Tokenizer directory: relative to this file when it lies below its directory, else absolute."""
    vocab_size: int
    """Largest id of the tokenizer + 1: the smallest vocab_size of a model for these tokens."""
    end_of_document: str
    """Token after each document."""
    end_of_document_id: int
    """Its id."""
    unigram_entropy_nats: float
    """Entropy of the training tokens' frequencies: the loss of the best model that ignores all context."""
    train: SplitFacts
    """Training tokens."""
    valid: SplitFacts | None = None
    """Held-out tokens."""
    source_hash: str
    """BLAKE2b over the digests of all documents in reading order: changes when any text, or their order, changes."""
    tokenizer_hash: str
    """BLAKE2b of tokenizer.json."""
    inputs: list[str]
    """The inputs as given."""
    skipped: dict[str, int]
    """Files, lines or documents left out, by reason."""
    prepared_by: dict[str, str]
    """Versions of mdsp, tokenizers and Python."""


def sidecar_path(prefix: str | Path) -> Path:
    """PREFIX.json of an output prefix."""
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str | Path, facts: CorpusFacts) -> None:
    """Write PREFIX.json in one step."""
    write_atomically(sidecar_path(prefix), (facts.model_dump_json(indent=2) + "\n").encode())


def read_sidecar(path: Path) -> CorpusFacts:
    """Read a sidecar; its `tokenizer` comes back as a path usable from the working directory.

    Raises:
        DataError: The file is missing or is not a sidecar.
    """
    try:
        facts = CorpusFacts.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} fields are wrong"
        raise DataError(f"{path} is not a description written by `mdsp prepare` ({reason}); rerun it") from error
    return facts.model_copy(update={"tokenizer": os.path.join(path.parent, facts.tokenizer)})


def find_sidecar(prefix: str | Path) -> CorpusFacts | None:
    """The description of the dataset PREFIX (as given in `data.train` or `data.valid`); None when it has none."""
    name = os.fspath(prefix)
    for suffix in ("_train", "_valid"):
        path = sidecar_path(name.removesuffix(suffix))
        if name.endswith(suffix) and path.is_file():
            return read_sidecar(path)
    return None


def split_facts(prefix: str | Path) -> SplitFacts | None:
    """The entry of the dataset PREFIX in its sidecar; None when it has none."""
    facts = find_sidecar(prefix)
    if facts is None:
        return None
    found = [split for split in (facts.train, facts.valid) if split and split.name == Path(prefix).name]
    return found[0] if found else None
