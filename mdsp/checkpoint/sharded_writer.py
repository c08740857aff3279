"""Writes a sharded checkpoint from any weights: a file per pipeline layer and tensor rank, engine state, manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from mdsp.checkpoint.atomic import TEMPORARY_SUFFIX, sync_directory, write_atomic
from mdsp.checkpoint.hf_reader import load_pickle
from mdsp.checkpoint.layout import (
    CONVERTED_TAG,
    LATEST,
    layer_file,
    state_file,
    stored_layers,
    stored_parameters,
)
from mdsp.checkpoint.manifest import FORMAT, Counters, Manifest, StoredFile, StoredTensor, write_manifest
from mdsp.checkpoint.pieces import Pieces
from mdsp.checkpoint.stream import Syncer, hash_pieces, write_pieces
from mdsp.checkpoint.torch_file import create_torch_file
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

    def __init__(self, weights: Weights, target: Target, directory: Path, progress: Callable[[int], None]) -> None:
        self.weights = weights
        self.target = target
        self.directory = directory
        self.progress = progress
        self.layers: dict[int, tuple[StoredTensor, ...]] = {}
        self.syncer = Syncer()

    def _dtype(self, parameter: Parameter) -> torch.dtype:
        return self.target.dtype or self.weights.dtype(parameter)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of all files of a layer, their containers aside."""
        parameters = stored_parameters(self.weights.config, layer)
        return sum(self._rank_bytes(parameter) for parameter in parameters) * self.target.tensor

    def _rank_bytes(self, parameter: Parameter) -> int:
        return int(torch.Size(parameter.local_shape(self.target.tensor)).numel()) * self._dtype(parameter).itemsize

    def write_layer(self, layer: int) -> list[dict[str, Any]]:
        """Write a layer's files; returns their tensors as the journal keeps them."""
        self.weights.verify(layer)
        stored = []
        for rank in range(self.target.tensor):
            stored += self._write_rank(layer, rank)
        self.layers[layer] = tuple(stored)
        return [entry.model_dump(mode="json") for entry in stored]

    def _write_rank(self, layer: int, rank: int) -> list[StoredTensor]:
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
                digest = write_pieces(descriptor, offsets[one.attribute], one.name, runs, shape, dtype, self.progress)
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
        self.syncer.add(path)
        return stored

    def accept_layer(self, layer: int, recorded: list[dict[str, Any]]) -> bool:
        """Take over the files of a layer that an earlier run wrote, if every tensor matches its recorded hash."""
        try:
            stored = tuple(StoredTensor.model_validate(values) for values in recorded)
            for rank in range(self.target.tensor):
                path = self.directory / layer_file(layer, rank)
                tensors = load_pickle(path)
                mine = [entry for entry in stored if entry.rank == rank]
                if set(tensors) != {entry.key for entry in mine}:
                    return False
                if any(hash_pieces((Pieces((tensors[e.key],)),), tensors[e.key].dtype) != e.hash for e in mine):
                    return False
                self.syncer.add(path)
        except (CheckpointError, OSError, ValueError):
            return False
        self.layers[layer] = stored
        return True

    def finish(
        self, hf_files: tuple[StoredFile, ...], origin: Mapping[str, Any], counters: Counters, root: Path
    ) -> Manifest:
        """Write what is not a layer, wait until everything is durable, then write the manifest and `latest`."""
        files = tuple(self._write_state(rank) for rank in range(self.target.tensor * self.target.pipeline))
        self.syncer.join()
        sync_directory(self.directory)
        manifest = Manifest(
            format=FORMAT,
            complete=True,
            what="weights",
            model=self.weights.config,
            tensor=self.target.tensor,
            pipeline=self.target.pipeline,
            blocks_per_stage=self.target.blocks_per_stage,
            tensors=tuple(entry for layer in stored_layers(self.weights.config) for entry in self.layers[layer]),
            files=files,
            hf_files=hf_files,
            origin=origin,
            counters=counters,
        )
        write_manifest(manifest, self.directory)
        write_atomic(root / LATEST, CONVERTED_TAG.encode())
        return manifest

    def _write_state(self, rank: int) -> StoredFile:
        """What DeepSpeed's `load_checkpoint(..., load_module_only=True)` looks for besides the layers' files."""
        path = self.directory / state_file(rank)
        state = {
            "module": None,
            "dp_world_size": 1,
            "mp_world_size": self.target.tensor * self.target.pipeline,
            "global_steps": 0,
            "global_samples": 0,
            "skipped_steps": 0,
        }
        torch.save(state, path)
        self.syncer.add(path)
        data = path.read_bytes()
        return StoredFile(file=path.name, size=len(data), hash=xxhash.xxh3_128(data).hexdigest())
