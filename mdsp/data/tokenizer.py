"""Tokenizers for a corpus: one loaded from a Hugging Face directory, or a byte-level BPE trained on the corpus.

Only the `tokenizers` library is used; a trained tokenizer is written as a directory that `transformers` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mdsp.data.files import write_atomically
from mdsp.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""All bytes, and the end-of-document token."""


@dataclass(frozen=True)
class CorpusTokenizer:
    """A tokenizer ready for plain text: no padding, no truncation, nothing added to a text."""

    tokenizer: Tokenizer
    path: Path
    """Directory (or tokenizer.json) that it was loaded from or is to be saved in."""
    vocab_size: int
    """Largest id + 1."""
    end_of_document: str
    end_of_document_id: int


def load_tokenizer(path: Path, end_of_document: str | None, parse_special_tokens: bool) -> CorpusTokenizer:
    """Load a Hugging Face tokenizer directory, or its tokenizer.json.

    Args:
        path: Directory or file.
        end_of_document: Token put after each document; None takes `<|endoftext|>` when the vocabulary has it, else
            the tokenizer's own end-of-sequence token.
        parse_special_tokens: Whether the text of a special token inside a document becomes that token. Otherwise it
            is text like any other, so that a document cannot contain a separator.

    Raises:
        DataError: There is no tokenizer.json, it is damaged, or no end-of-document token can be found.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"tokenizer: {file} does not exist; give a directory with a tokenizer.json (a slow tokenizer becomes one "
            f"with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)), or use --train-tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"tokenizer: {file} cannot be read ({error}); copy it again") from error
    if end_of_document is None:
        end_of_document = _guess_end_of_document(tokenizer, file)
    return _ready(tokenizer, path, end_of_document, parse_special_tokens)


def train_tokenizer(texts: Iterator[str], vocab_size: int, directory: Path) -> CorpusTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; on bytes, Radford et al. 2019), to be saved in `directory`.

    The vocabulary holds all 256 bytes and `<|endoftext|>` (id 0), so that any text can be encoded. It is smaller than
    `vocab_size` when the corpus has no more pairs to merge.

    Raises:
        DataError: `vocab_size` is below 257.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"--train-tokenizer {vocab_size}: a byte-level vocabulary has at least {SMALLEST_VOCABULARY} tokens "
            f"(256 bytes and {END_OF_DOCUMENT}); give a larger number"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _ready(tokenizer, directory, END_OF_DOCUMENT, parse_special_tokens=False)


def save_tokenizer(trained: CorpusTokenizer) -> None:
    """Write a trained tokenizer to its directory, as `transformers` reads it."""
    directory, eod = trained.path, trained.end_of_document
    special = {"bos_token": eod, "eos_token": eod, "unk_token": eod}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # transformers' way to say: no limit
    }
    write_atomically(directory / "tokenizer.json", trained.tokenizer.to_str(pretty=True).encode())
    write_atomically(directory / "tokenizer_config.json", _json(config))
    write_atomically(directory / "special_tokens_map.json", _json(special))


def _ready(tokenizer: Tokenizer, path: Path, end_of_document: str, parse_special_tokens: bool) -> CorpusTokenizer:
    identity = tokenizer.token_to_id(end_of_document)
    if identity is None:
        raise DataError(
            f"tokenizer {path}: the end-of-document token '{end_of_document}' is not in its vocabulary; name one that "
            f"is with --eod-token"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = not parse_special_tokens
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return CorpusTokenizer(tokenizer, path, vocab_size, end_of_document, identity)


def _guess_end_of_document(tokenizer: Tokenizer, file: Path) -> str:
    if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
        return END_OF_DOCUMENT
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads((file.parent / name).read_text()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    raise DataError(
        f"tokenizer {file}: neither '{END_OF_DOCUMENT}' in its vocabulary nor an eos_token in tokenizer_config.json "
        f"beside it; name the token that ends a document with --eod-token"
    )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
