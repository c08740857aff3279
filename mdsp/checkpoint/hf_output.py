"""A Hugging Face directory as the output of a conversion: shards, index, configuration, carried files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdsp.checkpoint.conversion import Job, Progress, layer_jobs
from mdsp.checkpoint.hf_files import carried_files, copy_files, restore_files, special_tokens
from mdsp.checkpoint.hf_map import hf_pieces
from mdsp.checkpoint.hf_writer import INDEX, HfWriter
from mdsp.checkpoint.jobs import run_jobs
from mdsp.checkpoint.layout import HF_FILES
from mdsp.checkpoint.partial import JOURNAL
from mdsp.checkpoint.pieces import Pieces
from mdsp.checkpoint.safetensors_file import map_file, map_tensor, read_header
from mdsp.checkpoint.stream import hash_pieces
from mdsp.checkpoint.weights import HfWeights, ShardedWeights, dtype_name
from mdsp.errors import CheckpointError, ConfigError
from mdsp.families import get_family, read_hf_config
from mdsp.model.table import parameter_table


@dataclass
class HfOutput:
    """Any weights as a Hugging Face directory. See `mdsp.checkpoint.conversion`."""

    weights: HfWeights | ShardedWeights
    max_shard_bytes: int
    dtype: torch.dtype | None
    left_aside: tuple[str, ...] = ()
    optimizer_state: str = ""

    def __post_init__(self) -> None:
        weights = self.weights
        self.parameters = len(parameter_table(weights.config))
        self.plan = {
            "make": "Hugging Face directory",
            "source": weights.fingerprint(),
            "max_shard_bytes": self.max_shard_bytes,
            "dtype": dtype_name(self.dtype) if self.dtype is not None else "auto",
        }
        maps = get_family(weights.config.family).tensors(weights.config)
        if isinstance(weights, ShardedWeights):
            read = f"{len(weights.manifest.tensors)} stored tensors compared with their hashes"
        else:  # has no hashes
            read = f"each of {len(weights.names)} tensors of the source used once"
            self.left_aside = weights.left_aside
        self.verified = f"{read}, no NaN, {len(maps)} tensors written once"

    def prepare(self, directory: Path, advance: Callable[[int], None]) -> list[Job]:
        """A job for each layer."""
        self._writer = HfWriter(self.weights, directory, self.max_shard_bytes, self.dtype, advance)
        return layer_jobs(self._writer, self._writer.layers)

    def open(self) -> None:
        """Create the shards at their final sizes."""
        self._writer.open()

    def close(self) -> None:
        """Close the shards."""
        self._writer.close()

    def finish(self, directory: Path) -> tuple[str, ...]:
        """Carried files, index, and last `config.json`."""
        carried = _carry(self.weights, directory)
        config = export_config(self.weights, directory, self._writer.common_dtype())
        (directory / "config.json").unlink(missing_ok=True)
        for name in carried:
            if name != "config.json":
                self._writer.syncer.add(directory / name)
        self._writer.finish(config)
        return carried

    def difference(self, directory: Path, progress: Progress, threads: int) -> str | None:
        """Nothing in such a directory says what made it, so everything is compared with what would be written."""
        writer = HfWriter(self.weights, directory, self.max_shard_bytes, self.dtype, progress.advance)
        return (
            _other_headers(writer)
            or self._other_small_files(writer, directory)
            or self._other_values(writer, progress, threads)
        )

    def _other_small_files(self, writer: HfWriter, directory: Path) -> str | None:
        with tempfile.TemporaryDirectory() as name:
            fresh = Path(name)
            carried = _carry(self.weights, fresh)
            config = export_config(self.weights, fresh, writer.common_dtype())
            for file in carried:
                path = directory / file
                if file != "config.json" and (not path.is_file() or path.read_bytes() != (fresh / file).read_bytes()):
                    return f"its {file} is another"
        expected: dict[str, Any] = {"config.json": config}
        if len(writer.files) > 1:
            index = {"total_size": writer.total_bytes}
            expected[INDEX] = {"metadata": index, "weight_map": dict(sorted(writer.file_of.items()))}
        for file, values in expected.items():
            try:
                same = json.loads((directory / file).read_bytes()) == values
            except (OSError, ValueError, RecursionError):
                same = False
            if not same:
                return f"its {file} is another"
        return None

    def _other_values(self, writer: HfWriter, progress: Progress, threads: int) -> str | None:
        progress.start(writer.total_bytes)
        maps = {layer: [m for m in writer.maps if m.pieces[0].parameter.layer == layer] for layer in writer.layers}
        mapped = {file: map_file(writer.directory / file) for file in writer.files}
        other: list[str] = []

        def compare(index: int) -> None:
            layer = writer.layers[index]
            self.weights.verify(layer)
            for entry in maps[layer]:
                place = writer.entries[entry.name]
                there = map_tensor(mapped[writer.file_of[entry.name]], place)
                wanted = hf_pieces(entry, lambda parameter: self.weights.pieces(parameter, 1, 0))
                if hash_pieces((Pieces((there,)),), place.dtype) != hash_pieces(wanted, place.dtype):
                    other.append(entry.name)
                progress.advance(place.size)

        run_jobs(range(len(writer.layers)), compare, threads)
        return f"tensor {min(other)} has other values" if other else None


def _other_headers(writer: HfWriter) -> str | None:
    present = sorted(path.name for path in writer.directory.glob("*.safetensors"))
    if present != sorted(writer.files):
        return f"its shards are {', '.join(present) or 'none'}, not {', '.join(writer.files)}"
    for file in writer.files:
        try:
            entries, _ = read_header(writer.directory / file)
        except CheckpointError as error:
            return str(error)
        if entries != {name: entry for name, entry in writer.entries.items() if writer.file_of[name] == file}:
            return f"{file} holds other tensors, or of other types"
    return None


def export_config(weights: HfWeights | ShardedWeights, directory: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of an export whose carried files are in `directory`.

    The original one is kept where it describes this very model, so that fields that mdsp does not need survive.
    """
    family = get_family(weights.config.family)
    made = family.config_to_hf(weights.config)
    values: dict[str, Any] | None = None
    if (directory / "config.json").is_file():
        original = read_hf_config(directory)
        try:
            same = family.config_to_hf(family.config_from_hf(original)) == made
        except ConfigError:
            same = False
        if same:
            values = {key: value for key, value in original.items() if key != "auto_map"}
    if values is None:
        values = made | special_tokens(directory)
    key = "torch_dtype" if "torch_dtype" in values else "dtype"
    return values | {key: dtype_name(dtype)}


def _carry(weights: HfWeights | ShardedWeights, target: Path) -> tuple[str, ...]:
    if isinstance(weights, ShardedWeights):
        restore_files(weights.manifest.hf_files, weights.directory, f"{HF_FILES}/", target)
        return tuple(entry.file.removeprefix(f"{HF_FILES}/") for entry in weights.manifest.hf_files)
    copy_files(weights.path, target)
    return tuple(name for name in carried_files(weights.path) if name != JOURNAL)
