"""The small files of a Hugging Face directory (tokenizer, generation config, chat template...), copied as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from mdsp.checkpoint.manifest import StoredFile
from mdsp.errors import CheckpointError

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".vocab", ".bpe", ".spm")
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "LICENSE.txt")
_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "mdsp.json")
_FOLDERS = ("additional_chat_templates", "chat_templates")
_MAX_BYTES = 2**28  # tokenizers reach some tens of megabytes


def carried_files(source: Path) -> list[str]:
    """Names of the files that go with the weights, relative to the directory; no code, no weights."""
    found = []
    for path in sorted(source.iterdir()) + [one for folder in _FOLDERS for one in sorted((source / folder).glob("*"))]:
        known = path.suffix in _SUFFIXES or path.name in _NAMES
        if path.is_file() and known and path.name not in _WEIGHTS and path.stat().st_size <= _MAX_BYTES:
            found.append(path.relative_to(source).as_posix())
    return found


def copy_files(source: Path, target: Path, below: str = "") -> tuple[StoredFile, ...]:
    """Copy the carried files; `below` is the prefix of their names in the manifest."""
    stored = []
    for name in carried_files(source):
        data = (source / name).read_bytes()
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
        stored.append(StoredFile(file=f"{below}{name}", size=len(data), hash=xxhash.xxh3_128(data).hexdigest()))
    return tuple(stored)


def restore_files(stored: tuple[StoredFile, ...], directory: Path, below: str, target: Path) -> None:
    """Copy files out of a checkpoint into an export, each compared with its hash.

    Raises:
        CheckpointError: one is missing or changed.
    """
    for entry in stored:
        path = directory / entry.file
        data = path.read_bytes() if path.is_file() else None
        if data is None or xxhash.xxh3_128(data).hexdigest() != entry.hash:
            raise CheckpointError(f"{path} is missing or does not match its hash; the checkpoint is damaged")
        destination = target / entry.file.removeprefix(below)
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_bytes(data)


def special_tokens(directory: Path) -> dict[str, int | None]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` of the tokenizer in a directory; None where it has none.

    A configuration without them would get those of the Hugging Face class, which belong to another vocabulary.
    """
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    try:
        settings: dict[str, Any] = json.loads((directory / "tokenizer_config.json").read_bytes())
        tokenizer: dict[str, Any] = json.loads((directory / "tokenizer.json").read_bytes())
        vocabulary = dict(tokenizer.get("model", {}).get("vocab", {}))
        vocabulary |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ids
    for key in ids:
        token = settings.get(key.removesuffix("_id"))
        content = token.get("content") if isinstance(token, dict) else token
        found = vocabulary.get(content) if isinstance(content, str) else None
        ids[key] = found if isinstance(found, int) else None
    return ids


def remove_tree(path: Path) -> None:
    """Remove a directory of copied files that will be copied again."""
    shutil.rmtree(path, ignore_errors=True)
