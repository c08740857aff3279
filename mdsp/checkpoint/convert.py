"""Conversion: Hugging Face to shards, shards to Hugging Face, shards to other degrees. Nothing is ever held whole."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch

from mdsp.checkpoint.conversion import Progress, Summary, make
from mdsp.checkpoint.hf_files import copy_files, restore_files
from mdsp.checkpoint.hf_output import HfOutput
from mdsp.checkpoint.layout import HF_FILES, check_degrees
from mdsp.checkpoint.manifest import StoredFile
from mdsp.checkpoint.partial import refuse_partial
from mdsp.checkpoint.sharded_output import ShardedOutput
from mdsp.checkpoint.sharded_writer import Target
from mdsp.checkpoint.weights import HfWeights, ShardedWeights, open_weights
from mdsp.config.schema import ParallelConfig
from mdsp.config.stages import stage_blocks
from mdsp.families import get_family
from mdsp.families.tensors import by_parameter
from mdsp.model.config import ModelConfig


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
    maps = by_parameter(weights.family.tensors(weights.config))
    output = ShardedOutput(
        weights,
        _target(weights.config, tensor, pipeline, dtype),
        origin={"kind": "hugging_face", "path": str(hf_dir), "model_type": weights.family.model_type},
        copy_hf=lambda directory: copy_files(hf_dir, directory, f"{HF_FILES}/"),
        verified=f"each of {len(weights.names)} tensors of the source used once, no NaN, every tensor written hashed",
        names={name: weights.names[entry.name] for name, (entry, _) in maps.items()},
        left_aside=weights.left_aside,
    )
    return make(out, output, progress, threads)


def reshape(
    checkpoint: Path,
    out: Path,
    tensor: int = 1,
    pipeline: int = 1,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    weights_only: bool = False,
) -> Summary:
    """Write a sharded checkpoint at other degrees: the weights, and of a checkpoint of training what resuming needs.

    `dtype` is that of the weights; master weights and optimizer state keep theirs. `weights_only` leaves these behind.

    Raises: as `from_hf`; also CheckpointError when the optimizer state is in a form that does not convert.
    """
    refuse_partial(checkpoint)
    weights = ShardedWeights(checkpoint)
    manifest = weights.manifest
    target = _target(weights.config, tensor, pipeline, dtype)
    training, optimizer_state = None, ""
    verified = f"{len(manifest.tensors)} shards compared with their hashes, no NaN, every tensor written hashed"
    if manifest.training is not None and weights_only:
        optimizer_state = "left behind, as asked for"
    elif manifest.training is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed announces the accelerator that it has not found
            from mdsp.checkpoint.training_part import TrainingPart

        training = TrainingPart(weights)
        optimizer_state = "carried along; resumes at any layout"

    def copy(directory: Path) -> tuple[StoredFile, ...]:
        restore_files(manifest.hf_files, weights.directory, f"{HF_FILES}/", directory)
        return manifest.hf_files

    origin = {
        "kind": "reshaped",
        "path": str(checkpoint),
        "tensor": manifest.tensor,
        "pipeline": manifest.pipeline,
        "origin": dict(manifest.origin),
    }
    output = ShardedOutput(
        weights,
        target,
        origin=origin,
        copy_hf=copy,
        verified=verified,
        counters=manifest.counters,
        training=training,
        optimizer_state=optimizer_state,
    )
    return make(out, output, progress, threads)


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
    get_family(weights.config.family).config_to_hf(weights.config)  # refuse what cannot be expressed before writing
    return make(out, HfOutput(weights, max_shard_bytes, dtype), progress, threads)
