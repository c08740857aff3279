"""Writes the weights of a sharded checkpoint: a file per pipeline layer and tensor rank, and the engine's state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdsp.checkpoint.atomic import TEMPORARY_SUFFIX, sync_directory
from mdsp.checkpoint.hashing import file_hash
from mdsp.checkpoint.hf_reader import load_pickle
from mdsp.checkpoint.layout import layer_file, state_file, stored_layers, stored_parameters
from mdsp.checkpoint.manifest import StoredFile, StoredTensor
from mdsp.checkpoint.pieces import Pieces
from mdsp.checkpoint.stream import Syncer, hash_pieces, write_pieces
from mdsp.checkpoint.torch_file import create_torch_file, save_small
from mdsp.checkpoint.weights import Weights, dtype_name
from mdsp.errors import CheckpointError
from mdsp.model.table import Parameter


@dataclass(frozen=True)
class Target:
    """What is to be written: degrees, and the type of the elements (None: as in the source)."""

    tensor: int
    pipeline: int
    blocks_per_stage: tuple[int, ...]
    dtype: torch.dtype | None


class ShardedWriter:
    """Writes into `directory` (the tag's); the layers may be written in any order, from several threads."""

    def __init__(
        self,
        weights: Weights,
        target: Target,
        directory: Path,
        progress: Callable[[int], None],
        names: Mapping[str, str],
        hash_files: bool,
    ) -> None:
        """names: of parameters, what messages call them when not by their own. hash_files: also files as a whole."""
        self.weights = weights
        self.target = target
        self.directory = directory
        self.progress = progress
        self.tensors: dict[int, tuple[StoredTensor, ...]] = {}
        """What has been written, by layer."""
        self.files: dict[int, tuple[StoredFile, ...]] = {}
        """The same as whole files, when they are hashed."""
        self._names = names
        self._hash_files = hash_files
        self._syncer = Syncer()

    def _dtype(self, parameter: Parameter) -> torch.dtype:
        return self.target.dtype or self.weights.dtype(parameter)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of all files of a layer, their containers aside."""
        parameters = stored_parameters(self.weights.config, layer)
        return sum(self._rank_bytes(parameter) for parameter in parameters) * self.target.tensor

    def _rank_bytes(self, parameter: Parameter) -> int:
        return int(torch.Size(parameter.local_shape(self.target.tensor)).numel()) * self._dtype(parameter).itemsize

    def write_layer(self, layer: int) -> dict[str, Any]:
        """Write a layer's files; returns their tensors and hashes as the journal keeps them."""
        with self.weights.checked(layer) as see:
            stored = [entry for rank in range(self.target.tensor) for entry in self._write_rank(layer, rank, see)]
        self.tensors[layer] = tuple(stored)
        self.files[layer] = tuple(self._whole(layer_file(layer, rank)) for rank in self._hashed_ranks())
        return {
            "tensors": [entry.model_dump(mode="json") for entry in stored],
            "files": [entry.model_dump(mode="json") for entry in self.files[layer]],
        }

    def _hashed_ranks(self) -> range:
        return range(self.target.tensor if self._hash_files else 0)

    def _whole(self, name: str) -> StoredFile:
        path = self.directory / name
        return StoredFile(file=name, size=path.stat().st_size, hash=file_hash(path))

    def _write_rank(self, layer: int, rank: int, see: Callable[[Tensor], None]) -> list[StoredTensor]:
        tensor, name = self.target.tensor, layer_file(layer, rank)
        path = self.directory / name
        temporary = path.with_name(name + TEMPORARY_SUFFIX)
        parameters = stored_parameters(self.weights.config, layer)
        shapes = {one.attribute: (one.local_shape(tensor), self._dtype(one)) for one in parameters}
        offsets = create_torch_file(temporary, shapes)
        stored = []
        descriptor = os.open(temporary, os.O_WRONLY)
        try:
            for one in parameters:
                shape, dtype = shapes[one.attribute]
                runs = (self.weights.pieces(one, tensor, rank),)
                title = self._names.get(one.name, one.name)
                digest = write_pieces(
                    descriptor, offsets[one.attribute], title, runs, shape, dtype, self.progress, see=see
                )
                stored.append(
                    StoredTensor(
                        parameter=one.name,
                        rank=rank,
                        file=name,
                        key=one.attribute,
                        shape=shape,
                        dtype=dtype_name(dtype),  # type: ignore[arg-type]
                        hash=digest,
                    )
                )
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        self.add(path)
        return stored

    def accept_layer(self, layer: int, recorded: dict[str, Any]) -> bool:
        """Take over the files of a layer that an earlier run wrote, if everything matches its recorded hash."""
        try:
            stored = tuple(StoredTensor.model_validate(values) for values in recorded["tensors"])
            files = tuple(StoredFile.model_validate(values) for values in recorded["files"])
            for rank in range(self.target.tensor):
                path = self.directory / layer_file(layer, rank)
                tensors = load_pickle(path)
                mine = [entry for entry in stored if entry.rank == rank]
                if set(tensors) != {entry.key for entry in mine}:
                    return False
                if any(hash_pieces((Pieces((tensors[e.key],)),), tensors[e.key].dtype) != e.hash for e in mine):
                    return False
                self.add(path)
            if files != tuple(self._whole(layer_file(layer, rank)) for rank in self._hashed_ranks()):
                return False
        except (CheckpointError, OSError, ValueError):
            return False
        self.tensors[layer], self.files[layer] = stored, files
        return True

    def write_state(self, state: Any, rank: int) -> StoredFile:
        """Write the engine's state of one model-parallel rank."""
        name = state_file(rank)
        size, digest = save_small(state, self.directory / name)
        self.add(self.directory / name)
        return StoredFile(file=name, size=size, hash=digest)

    def add(self, path: Path) -> None:
        """A file that `join` shall make durable."""
        self._syncer.add(path)

    def join(self) -> None:
        """Wait until everything is durable.

        Raises:
            OSError: something could not be written to the disk.
        """
        self._syncer.join()
        sync_directory(self.directory)

    def all_tensors(self) -> tuple[StoredTensor, ...]:
        """Everything that has been written, in pipeline order."""
        return tuple(entry for layer in stored_layers(self.weights.config) for entry in self.tensors[layer])

    def all_files(self) -> tuple[StoredFile, ...]:
        """The layers' files, when they are hashed as a whole."""
        return tuple(entry for layer in stored_layers(self.weights.config) for entry in self.files[layer])
