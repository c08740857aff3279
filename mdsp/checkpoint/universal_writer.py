"""Writes the universal form of optimizer state (`mdsp.checkpoint.universal`): streamed, hashed, durable at the end.

DeepSpeed has a converter of its own, which runs the pickles that it reads, knows Adam only, and holds all optimizer
state of a stage in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mdsp.checkpoint.atomic import TEMPORARY_SUFFIX, sync_directory, write_atomic
from mdsp.checkpoint.engine_io import read_file, to_host
from mdsp.checkpoint.hashing import file_hash
from mdsp.checkpoint.layout import MANIFEST, state_file
from mdsp.checkpoint.manifest import Manifest, StoredFile
from mdsp.checkpoint.optimizer_state import OptimizerState, Runs, open_optimizer_state
from mdsp.checkpoint.rotation import SAVING_PREFIX, publish_tree
from mdsp.checkpoint.stream import Syncer, write_pieces
from mdsp.checkpoint.torch_file import create_torch_file, save_small
from mdsp.checkpoint.universal import DESCRIPTION, FOLDER, GLOBAL_STATE, STEP, state_folder, universal_directory
from mdsp.errors import CheckpointError
from mdsp.model.table import Parameter, parameter_table


class UniversalWriter:
    """Writes into `directory`; the parameters may be written in any order, from several threads."""

    def __init__(self, source: OptimizerState, directory: Path, progress: Callable[[int], None]) -> None:
        self._source = source
        self._directory = directory
        self._progress = progress
        self._syncer = Syncer()
        self._folders = {directory / FOLDER, directory}
        (directory / FOLDER).mkdir(exist_ok=True)

    def parameter_bytes(self, parameter: Parameter) -> int:
        """Bytes of the tensors of a parameter's states."""
        return parameter.numel * self._source.bytes_per_element()

    def write(self, parameter: Parameter) -> list[StoredFile]:
        """Write the states of a parameter."""
        folder = state_folder(parameter)
        (self._directory / folder).mkdir(exist_ok=True)
        written = [
            self._write_state(parameter, key, runs, f"{folder}/{key}.pt")
            for key, runs in self._source.states(parameter).items()
        ]
        step = self._source.step(parameter)
        if step is not None:
            written.append(self.write_small(step, f"{folder}/{STEP}.pt"))
        return written

    def _write_state(self, parameter: Parameter, key: str, runs: Runs, name: str) -> StoredFile:
        path = self._directory / name
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        marks: dict[str, Any] = {}  # as DeepSpeed's converter sets them
        if parameter.padded_rows:
            marks["vocab_tensor"] = True
        if parameter.split_dim is not None:
            marks["cat_dim"] = parameter.split_dim
        dtype = runs[0].dtype
        offset = create_torch_file(temporary, {"param": (parameter.shape, dtype)}, marks)["param"]
        descriptor = os.open(temporary, os.O_WRONLY)
        try:
            title = f"{key} of {parameter.name}"
            write_pieces(descriptor, offset, title, runs, parameter.shape, dtype, self._progress)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        return self._stored(name, path.stat().st_size, file_hash(path))

    def write_small(self, value: Any, name: str) -> StoredFile:
        """Write anything else that belongs to the checkpoint."""
        return self._stored(name, *save_small(to_host(value, copy=True), self._directory / name))

    def write_global_state(self) -> StoredFile:
        """Write what belongs to no parameter."""
        return self.write_small(self._source.global_state(), GLOBAL_STATE)

    def _stored(self, name: str, size: int, digest: str) -> StoredFile:
        self._add(self._directory / name)
        return StoredFile(file=name, size=size, hash=digest)

    def _add(self, path: Path) -> None:
        self._syncer.add(path)
        self._folders.add(path.parent)

    def accept(self, files: Sequence[StoredFile]) -> bool:
        """Take over files that an earlier run wrote, if they are what it recorded."""
        for file in files:
            path = self._directory / file.file
            try:
                if file_hash(path) != file.hash:
                    return False
            except OSError:
                return False
            self._add(path)
        return True

    def join(self) -> None:
        """Wait until everything is durable.

        Raises:
            OSError: something could not be written to the disk.
        """
        self._syncer.join()
        for folder in self._folders:
            sync_directory(folder)


def _convert_share(directory: Path, manifest: Manifest, root: Path, rank: int, ranks: int) -> list[StoredFile]:
    """Convert every `ranks`-th parameter; rank 0 writes the rest too."""
    source = open_optimizer_state(directory, manifest, verify=False)  # the ranks have just compared all hashes
    writer = UniversalWriter(source, root, lambda done: None)
    by_size = sorted(parameter_table(manifest.model), key=lambda p: (-p.numel, p.name))
    written = [file for parameter in by_size[rank::ranks] for file in writer.write(parameter)]
    if rank == 0:
        written.append(writer.write_global_state())
        for index in range(manifest.tensor * manifest.pipeline):
            name = state_file(index)
            written.append(writer.write_small(read_file(directory / name), name))
    writer.join()
    return written


def convert_to_universal(directory: Path, manifest: Manifest) -> Path:
    """Write the universal form of the training checkpoint in `directory` beside it.

    Collective when torch.distributed is initialised: the parameters are then shared out among the ranks.

    Raises:
        CheckpointError: on all ranks alike.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    final = universal_directory(directory)
    root = final.with_name(f"{SAVING_PREFIX}{final.name}")
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    if ranks > 1:
        dist.barrier()
    written: list[StoredFile] = []
    failure: str | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        written = _convert_share(directory, manifest, root, rank, ranks)
    except (OSError, CheckpointError) as error:
        failure = f"rank {rank}: {error}"
    gathered: list[tuple[str | None, list[StoredFile]]] = [(failure, written)] * ranks
    if ranks > 1:
        dist.all_gather_object(gathered, (failure, written))
    failures = [reason for reason, _ in gathered if reason is not None]
    outcome: list[str | None] = [failures[0] if failures else None]
    if rank == 0 and not failures:
        try:
            files = sorted((file for _, share in gathered for file in share), key=lambda file: file.file)
            described = {
                "source": file_hash(directory / MANIFEST),
                "files": [file.model_dump(mode="json") for file in files],
            }
            write_atomic(root / DESCRIPTION, json.dumps(described, indent=1).encode())
            publish_tree(root, final)
        except OSError as error:
            outcome = [f"rank 0: {error}"]
    if ranks > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)
        raise CheckpointError(
            f"{directory} was saved at another layout, and {final} could not be written: {outcome[0]}"
        )
    return final
