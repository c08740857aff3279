"""Conversion: Hugging Face to shards, shards to Hugging Face, shards to other degrees. Nothing is ever held whole."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mdsp.checkpoint.hf_files import carried_files, copy_files, remove_tree, restore_files, special_tokens
from mdsp.checkpoint.hf_writer import HfWriter
from mdsp.checkpoint.jobs import default_threads, run_jobs
from mdsp.checkpoint.layout import CONVERTED_TAG, HF_FILES, check_degrees, stored_layers
from mdsp.checkpoint.manifest import Counters, StoredFile
from mdsp.checkpoint.partial import JOURNAL, PartialOutput, refuse_partial
from mdsp.checkpoint.sharded_writer import ShardedWriter, Target
from mdsp.checkpoint.weights import HfWeights, ShardedWeights, dtype_name, open_weights
from mdsp.config.schema import ParallelConfig
from mdsp.config.stages import stage_blocks
from mdsp.errors import CheckpointError, ConfigError, MdspError
from mdsp.families import get_family, read_hf_config
from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table


class Progress(Protocol):
    """What a conversion reports while it runs."""

    def start(self, total_bytes: int) -> None:
        """Work begins; this many bytes will be written."""
        ...

    def advance(self, done_bytes: int) -> None:
        """So many more bytes are done; called from several threads."""
        ...


class Silent:
    """No report."""

    def start(self, total_bytes: int) -> None:
        """Nothing."""

    def advance(self, done_bytes: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    out: Path
    parameters: int
    """Parameters of the model, each read once."""
    written_bytes: int
    """Bytes of tensors in the output, those of an earlier run included."""
    layers: int
    """Pipeline layers (jobs)."""
    resumed_layers: int
    """Layers that an earlier, interrupted run had finished; compared with their hashes."""
    left_aside: tuple[str, ...]
    """Tensors of the source that are no parameters: masks, rotary frequencies, copies of a tied head."""
    carried: tuple[str, ...]
    """Tokenizer and configuration files."""
    verified: str
    """What was checked, in words."""


class _Writer(Protocol):
    def layer_bytes(self, layer: int) -> int: ...
    def write_layer(self, layer: int) -> Any: ...
    def accept_layer(self, layer: int, recorded: Any) -> bool: ...


def _write_layers(
    writer: _Writer, layers: Sequence[int], output: PartialOutput, progress: Progress, threads: int
) -> int:
    """Write what an earlier run did not finish; returns how many layers it had."""
    accepted = []
    lock = threading.Lock()

    def job(layer: int) -> None:
        recorded = output.finished.get(str(layer))
        if recorded is not None and writer.accept_layer(layer, recorded):
            progress.advance(writer.layer_bytes(layer))
            with lock:
                accepted.append(layer)
            return
        output.record(str(layer), writer.write_layer(layer))

    run_jobs(layers, job, threads)
    return len(accepted)


def _require_space(directory: Path, need: int, present: int) -> None:
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if need - present > free:
        raise CheckpointError(
            f"{existing} has {free / 1e9:.2f} GB free, the output needs {(need - present) / 1e9:.2f} GB more; make "
            f"room or choose another output"
        )


def _disk_usage(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _write_sharded(
    weights: HfWeights | ShardedWeights,
    out: Path,
    target: Target,
    origin: Mapping[str, Any],
    counters: Counters,
    copy_hf: Callable[[Path], tuple[StoredFile, ...]],
    progress: Progress,
    threads: int,
) -> tuple[int, int, tuple[StoredFile, ...]]:
    """The common part of `from_hf` and `reshape`; returns bytes, resumed layers and carried files."""
    plan = {
        "make": "sharded checkpoint",
        "source": weights.fingerprint(),
        "tensor": target.tensor,
        "pipeline": target.pipeline,
        "blocks_per_stage": list(target.blocks_per_stage),
        "dtype": dtype_name(target.dtype) if target.dtype is not None else "auto",
        "origin": dict(origin),
    }
    layers = stored_layers(weights.config)
    with PartialOutput(out, plan) as output:
        directory = output.path / CONVERTED_TAG
        directory.mkdir(exist_ok=True)
        writer = ShardedWriter(weights, target, directory, progress.advance)
        total = sum(writer.layer_bytes(layer) for layer in layers)
        _require_space(output.path, total, _disk_usage(output.path))
        progress.start(total)
        try:
            resumed = _write_layers(writer, layers, output, progress, threads)
            remove_tree(directory / HF_FILES)
            (directory / HF_FILES).mkdir()
            carried = copy_hf(directory / HF_FILES)
            writer.finish(carried, origin, counters, output.path)
        except MdspError:  # the source is to blame: nothing of this output can be used
            output.discard()
            raise
        output.finish()
    return total, resumed, carried


def _target(config: ModelConfig, tensor: int, pipeline: int, dtype: torch.dtype | None) -> Target:
    check_degrees(config, tensor, pipeline)
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    return Target(tensor, pipeline, stage_blocks(config, parallel, min(config.max_positions, 2048)), dtype)


def from_hf(
    hf_dir: Path,
    out: Path,
    tensor: int = 1,
    pipeline: int = 1,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Summary:
    """Convert a Hugging Face directory to a sharded checkpoint at `out`; `dtype` None keeps each tensor's own.

    Raises:
        ConfigError: the model or the degrees are not possible.
        CheckpointError: the weights cannot be read or do not fit the model, or the output is in the way.
        OSError: the disk is full or the like; the same call continues where this one stopped.
    """
    refuse_partial(hf_dir)
    weights = HfWeights(hf_dir)
    target = _target(weights.config, tensor, pipeline, dtype)
    origin = {"kind": "hugging_face", "path": str(hf_dir), "model_type": weights.family.model_type}

    def copy(directory: Path) -> tuple[StoredFile, ...]:
        return copy_files(hf_dir, directory, f"{HF_FILES}/")

    total, resumed, carried = _write_sharded(
        weights, out, target, origin, Counters(), copy, progress or Silent(), threads or default_threads()
    )
    return Summary(
        out=out,
        parameters=len(parameter_table(weights.config)),
        written_bytes=total,
        layers=len(stored_layers(weights.config)),
        resumed_layers=resumed,
        left_aside=weights.left_aside,
        carried=tuple(entry.file for entry in carried),
        verified=f"each of {len(weights.names)} tensors of the source used once, no NaN, every tensor written hashed",
    )


def reshape(
    checkpoint: Path,
    out: Path,
    tensor: int = 1,
    pipeline: int = 1,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Summary:
    """Write the weights of a sharded checkpoint at other degrees.

    Raises: as `from_hf`.
    """
    refuse_partial(checkpoint)
    weights = ShardedWeights(checkpoint)
    manifest = weights.manifest
    target = _target(weights.config, tensor, pipeline, dtype)
    origin = {
        "kind": "reshaped",
        "path": str(checkpoint),
        "tensor": manifest.tensor,
        "pipeline": manifest.pipeline,
        "origin": dict(manifest.origin),
    }

    def copy(directory: Path) -> tuple[StoredFile, ...]:
        restore_files(manifest.hf_files, weights.directory, f"{HF_FILES}/", directory)
        return manifest.hf_files

    total, resumed, carried = _write_sharded(
        weights, out, target, origin, manifest.counters, copy, progress or Silent(), threads or default_threads()
    )
    return Summary(
        out=out,
        parameters=len(parameter_table(weights.config)),
        written_bytes=total,
        layers=len(stored_layers(weights.config)),
        resumed_layers=resumed,
        left_aside=(),
        carried=tuple(entry.file for entry in carried),
        verified=f"{len(manifest.tensors)} shards compared with their hashes, no NaN, every tensor written hashed",
    )


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


def to_hf(
    checkpoint: Path,
    out: Path,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Summary:
    """Write the weights of a sharded checkpoint, converted or from training, as a Hugging Face directory.

    Raises: as `from_hf`.
    """
    refuse_partial(checkpoint)
    weights = open_weights(checkpoint)
    progress = progress or Silent()
    plan = {
        "make": "Hugging Face directory",
        "source": weights.fingerprint(),
        "max_shard_bytes": max_shard_bytes,
        "dtype": dtype_name(dtype) if dtype is not None else "auto",
    }
    get_family(weights.config.family).config_to_hf(weights.config)  # refuse what cannot be expressed before writing
    with PartialOutput(out, plan) as output:
        writer = HfWriter(weights, output.path, max_shard_bytes, dtype, progress.advance)
        _require_space(output.path, writer.total_bytes, _disk_usage(output.path))
        progress.start(writer.total_bytes)
        try:
            writer.open()
            resumed = _write_layers(writer, writer.layers, output, progress, threads or default_threads())
            carried = _carry(weights, output.path)
            config = export_config(weights, output.path, writer.common_dtype())
            (output.path / "config.json").unlink(missing_ok=True)
            writer.finish(config)
        except MdspError:
            output.discard()
            raise
        finally:
            writer.close()
        output.finish()
    stored = len(weights.manifest.tensors) if isinstance(weights, ShardedWeights) else len(weights.names)
    return Summary(
        out=out,
        parameters=len(parameter_table(weights.config)),
        written_bytes=writer.total_bytes,
        layers=len(writer.layers),
        resumed_layers=resumed,
        left_aside=(),
        carried=carried,
        verified=f"{stored} stored tensors compared with their hashes, no NaN, {len(writer.maps)} tensors written once",
    )


def _carry(weights: HfWeights | ShardedWeights, target: Path) -> tuple[str, ...]:
    if isinstance(weights, ShardedWeights):
        restore_files(weights.manifest.hf_files, weights.directory, f"{HF_FILES}/", target)
        return tuple(entry.file.removeprefix(f"{HF_FILES}/") for entry in weights.manifest.hf_files)
    copy_files(weights.path, target)
    return tuple(name for name in carried_files(weights.path) if name != JOURNAL)
