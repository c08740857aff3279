"""Reads Hugging Face directories tensor by tensor: safetensors or .bin, one file or an index; no code is ever run."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from mdsp.checkpoint.safetensors_file import Entry, map_file, map_tensor, read_header
from mdsp.errors import CheckpointError
from mdsp.families import Family
from mdsp.model.config import ModelConfig

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_MAX_INDEX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Where one tensor of the directory lies."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class HfDirectory:
    """The tensors of a Hugging Face directory, by name. Opening reads headers only.

    Raises:
        CheckpointError: no weights; an index that points nowhere or out of the directory; a damaged or cut-off file;
            a pickle that needs to run code.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        self._mapped: dict[str, Tensor] = {}
        self._pickled: dict[str, Tensor] = {}
        index, files = self._files()
        self.tensors: dict[str, HfTensor] = {}
        for file in files:
            self._open(file, index)
        for name, file in (index or {}).items():
            if name not in self.tensors:
                raise CheckpointError(f"{self.path}: the index says that tensor {name} is in {file}, but it is not")

    def _files(self) -> tuple[dict[str, str] | None, list[str]]:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory")
        for single in _SINGLE:
            if (self.path / single).is_file():
                return None, [single]
            index = self.path / f"{single}.index.json"
            if index.is_file():
                return self._read_index(index)
        raise CheckpointError(
            f"{self.path} holds no weights: none of {', '.join(_SINGLE)}, or an index of them, is in it"
        )

    def _read_index(self, path: Path) -> tuple[dict[str, str], list[str]]:
        try:
            if path.stat().st_size > _MAX_INDEX_BYTES:
                raise ValueError("too large")
            weight_map = json.loads(path.read_bytes())["weight_map"]
            pairs = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no index of weights ({type(error).__name__}: {error})") from None
        for name, file in pairs.items():
            if not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
                raise CheckpointError(f"{path} puts tensor {name} into {file!r}, which is not a file beside it")
            if not (self.path / file).is_file():
                raise CheckpointError(f"{path} puts tensor {name} into {file}, which does not exist")
        return pairs, sorted(set(pairs.values()))

    def _open(self, file: str, index: dict[str, str] | None) -> None:
        path = self.path / file
        if file.endswith(".safetensors"):
            entries, _ = read_header(path)
            found = {name: HfTensor(name, file, entry.dtype, entry.shape) for name, entry in entries.items()}
            self._mapped[file] = map_file(path)
            self._entries |= entries
        else:
            tensors = load_pickle(path)
            found = {name: HfTensor(name, file, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            self._pickled |= tensors
        for name, tensor in found.items():
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name} is in {self.tensors[name].file} and in {file}")
            if index is not None and index.get(name) != file:
                raise CheckpointError(f"{self.path}: tensor {name} lies in {file}, but the index does not say so")
            self.tensors[name] = tensor

    def tensor(self, name: str) -> Tensor:
        """A tensor, as a view of the mapped file."""
        if name in self._pickled:
            return self._pickled[name]
        return map_tensor(self._mapped[self.tensors[name].file], self._entries[name])

    def fingerprint(self) -> str:
        """Identifies the content without reading it: names, types and shapes of tensors, sizes and times of files."""
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.file}\n".encode())
        for file in sorted({tensor.file for tensor in self.tensors.values()}):
            status = (self.path / file).stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def resolve(self, family: Family, config: ModelConfig) -> tuple[dict[str, str], tuple[str, ...]]:
        """Match the file's tensors with the family's: (map name -> name in the file), and the names left aside.

        Names with and without the family's prefix are understood. Left aside are masks, rotary frequencies and copies
        of a tied head.

        Raises:
            CheckpointError: a tensor is missing, left over, of the wrong shape or type, or there twice.
        """
        left = dict(self.tensors)
        names: dict[str, str] = {}
        for entry in family.tensors(config):
            bare = entry.name.removeprefix(family.prefix)
            found = [name for name in dict.fromkeys((entry.name, bare)) if name in left]
            if not found:
                hint = self._hint(family, config, entry.name)
                raise CheckpointError(f"{self.path}: tensor {entry.name} {list(entry.shape)} is missing{hint}")
            if len(found) > 1:
                raise CheckpointError(f"{self.path}: tensor {found[1]} is there twice, also as {found[0]}")
            tensor = left.pop(found[0])
            if tensor.shape != entry.shape:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} has shape {list(tensor.shape)}; config.json needs "
                    f"{list(entry.shape)}"
                )
            if not tensor.dtype.is_floating_point:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} has elements of type {tensor.dtype}; only floating-point "
                    f"weights are converted"
                )
            names[entry.name] = tensor.name
        aside = [name for name in left if family.buffer(name)]
        copy = family.tied_copy(config)
        if copy is not None and copy in left:
            self._check_tied(copy, names[family.tensors(config)[0].name])
            aside.append(copy)
        extra = sorted(set(left) - set(aside))
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise CheckpointError(
                f"{self.path}: tensor {shown}: not part of a {family.name} model as config.json describes it"
            )
        return names, tuple(sorted(aside))

    def _hint(self, family: Family, config: ModelConfig, name: str) -> str:
        if name == f"{family.head}.weight" and not config.tied_head:
            return '; if the head is tied, config.json must say "tie_word_embeddings": true'
        return ""

    def _check_tied(self, copy: str, embedding: str) -> None:
        if not torch.equal(self.tensor(copy), self.tensor(embedding)):
            raise CheckpointError(
                f"{self.path}: config.json ties the head to the embedding, but tensor {copy} differs from {embedding}; "
                f'set "tie_word_embeddings": false to keep both, or remove {copy}'
            )


def load_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a `torch.save` file, mapped where the file allows it, without running any code of it.

    Raises:
        CheckpointError: it needs code to be read, is damaged, or holds something else than named tensors.
    """
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used with files saved with" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        detail = next((line.strip() for line in reason if "Unsupported" in line or "GLOBAL" in line), "")
        raise CheckpointError(
            f"{path} is a pickle that needs to run code to be read, or is damaged; it is refused. {detail}".strip()
        ) from None
    except (
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or no file of weights: {first}") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise CheckpointError(f"{path} is damaged or cut off: {error.strerror or error}") from None  # mapping it failed
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise CheckpointError(f"{path} does not hold named tensors only")
    for name, tensor in loaded.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{path}: tensor {name} is {kind}; only plain tensors with their values are read")
    return {name: tensor.detach() for name, tensor in loaded.items()}
