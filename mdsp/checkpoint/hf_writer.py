"""Writes a Hugging Face directory from any weights: safetensors shards, index, configuration, carried files."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdsp.checkpoint.atomic import sync_directory, write_at, write_atomic
from mdsp.checkpoint.hf_map import hf_pieces
from mdsp.checkpoint.pieces import Pieces
from mdsp.checkpoint.safetensors_file import Entry, map_file, map_tensor, plan_file
from mdsp.checkpoint.stream import Syncer, hash_pieces, write_pieces
from mdsp.checkpoint.weights import Weights
from mdsp.errors import CheckpointError
from mdsp.families import get_family
from mdsp.families.tensors import TensorMap

INDEX = "model.safetensors.index.json"


class HfWriter:
    """Writes into `directory`; the layers may be written in any order, from several threads."""

    def __init__(
        self,
        weights: Weights,
        directory: Path,
        max_shard_bytes: int,
        dtype: torch.dtype | None,
        progress: Callable[[int], None],
    ) -> None:
        self.weights = weights
        self.directory = directory
        self.progress = progress
        self.maps = get_family(weights.config.family).tensors(weights.config)
        self._dtypes = {entry.name: dtype or self._stored_dtype(entry) for entry in self.maps}
        self._by_layer: dict[int, list[TensorMap]] = {}
        for entry in self.maps:
            self._by_layer.setdefault(entry.pieces[0].parameter.layer, []).append(entry)
        self._plan(max_shard_bytes)
        self._descriptors: dict[str, int] = {}
        self._locks = {file: threading.Lock() for file in self.files}
        self.syncer = Syncer()

    def _stored_dtype(self, entry: TensorMap) -> torch.dtype:
        found = {self.weights.dtype(piece.parameter) for piece in entry.pieces}
        if len(found) > 1:
            raise CheckpointError(
                f"tensor {entry.name} holds {len(entry.pieces)} parameters that are stored in different types "
                f"({', '.join(sorted(str(one) for one in found))}); give one with --dtype"
            )
        return found.pop()

    def _plan(self, max_shard_bytes: int) -> None:
        """Fill the shards in the order of the model, none larger than the limit unless one tensor alone is."""
        shards: list[list[TensorMap]] = [[]]
        size = 0
        for entry in self.maps:
            need = self.tensor_bytes(entry)
            if shards[-1] and size + need > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += need
        single = len(shards) == 1
        self.files = (
            ["model.safetensors"]
            if single
            else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        )
        self.entries: dict[str, Entry] = {}
        self.file_of: dict[str, str] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for file, shard in zip(self.files, shards, strict=True):
            tensors = [(entry.name, self._dtypes[entry.name], entry.shape) for entry in shard]
            header, entries = plan_file(tensors, {"format": "pt"})
            self.entries |= entries
            self.file_of |= dict.fromkeys(entries, file)
            self._headers[file] = header
            self._sizes[file] = len(header) + sum(entry.size for entry in entries.values())

    def tensor_bytes(self, entry: TensorMap) -> int:
        """Bytes of a tensor in the file."""
        return int(torch.Size(entry.shape).numel()) * self._dtypes[entry.name].itemsize

    def layer_bytes(self, layer: int) -> int:
        """Bytes of all tensors of a pipeline layer."""
        return sum(self.tensor_bytes(entry) for entry in self._by_layer.get(layer, ()))

    @property
    def layers(self) -> tuple[int, ...]:
        """Pipeline layers that have tensors."""
        return tuple(sorted(self._by_layer))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensor_bytes(entry) for entry in self.maps)

    def common_dtype(self) -> torch.dtype:
        """The type of most bytes, for `config.json`."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.maps:
            sizes[self._dtypes[entry.name]] = sizes.get(self._dtypes[entry.name], 0) + self.tensor_bytes(entry)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def open(self) -> None:
        """Create the shards with their headers and final sizes; what an earlier run wrote into them stays."""
        for file in self.files:
            descriptor = os.open(self.directory / file, os.O_RDWR | os.O_CREAT, 0o644)
            self._descriptors[file] = descriptor
            os.posix_fallocate(descriptor, 0, self._sizes[file])  # a full disk shows now, and files are not scattered
            os.ftruncate(descriptor, self._sizes[file])
            write_at(descriptor, self._headers[file], 0)

    def close(self) -> None:
        """Close the shards."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def write_layer(self, layer: int) -> dict[str, str]:
        """Write the tensors of a pipeline layer; returns their hashes by name."""
        with self.weights.checked(layer) as see:
            hashes = {entry.name: self._write_tensor(entry, see) for entry in self._by_layer[layer]}
        for file in {self.file_of[entry.name] for entry in self._by_layer[layer]}:
            self.syncer.add(self.directory / file)
        return hashes

    def _write_tensor(self, entry: TensorMap, see: Callable[[Tensor], None]) -> str:
        place, file = self.entries[entry.name], self.file_of[entry.name]
        return write_pieces(
            self._descriptors[file],
            place.start,
            entry.name,
            hf_pieces(entry, lambda parameter: self.weights.pieces(parameter, 1, 0)),
            entry.shape,
            place.dtype,
            self.progress,
            self._locks[file],
            see,
        )

    def accept_layer(self, layer: int, recorded: dict[str, str]) -> bool:
        """Take over the tensors of a layer that an earlier run wrote, if each matches its recorded hash."""
        names = [entry.name for entry in self._by_layer[layer]]
        if set(recorded) != set(names):
            return False
        for name in names:
            mapped = map_file(self.directory / self.file_of[name])
            tensor = map_tensor(mapped, self.entries[name])
            if hash_pieces((Pieces((tensor,)),), tensor.dtype) != recorded[name]:
                return False
        for file in {self.file_of[name] for name in names}:
            self.syncer.add(self.directory / file)
        return True

    def finish(self, config: dict[str, Any]) -> None:
        """Wait until the shards are durable, then write the index and, last, `config.json`."""
        for file in self.files:
            self.syncer.add(self.directory / file)
        self.syncer.join()
        if len(self.files) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self.file_of.items()))}
            write_atomic(self.directory / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        write_atomic(self.directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        sync_directory(self.directory)
