"""The manifest of a sharded checkpoint: what it holds, piece by piece, with hashes. Written last, read first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from mdsp.checkpoint.atomic import write_atomic
from mdsp.checkpoint.layout import MANIFEST, stored_layers, stored_parameters, tag_directory
from mdsp.errors import CheckpointError
from mdsp.model.config import Frozen, ModelConfig

FORMAT = 1
"""Version of the manifest format that this code writes."""

_MAX_BYTES = 2**30


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name:
        raise ValueError(f"{name!r} is not a plain path below the checkpoint")
    return name


RelativePath = Annotated[str, AfterValidator(_relative)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class StoredTensor(Frozen):
    """One tensor in one file."""

    parameter: str
    """Name in the parameter table."""
    rank: int = Field(ge=0)
    """Tensor-parallel rank."""
    file: RelativePath
    """File below the manifest's directory."""
    key: str
    """Key in the file's state dictionary."""
    shape: tuple[int, ...]
    """Shape in the file: one rank's share, vocabulary padding included."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    """Type of the elements."""
    hash: Hash
    """XXH3-128 of the elements' bytes in row-major order, hexadecimal."""


class StoredFile(Frozen):
    """A file that is carried along as it is."""

    file: RelativePath
    """File below the manifest's directory."""
    size: int = Field(ge=0)
    """Bytes."""
    hash: Hash
    """XXH3-128 of its bytes."""


class Counters(Frozen):
    """How far training had come."""

    step: int = Field(default=0, ge=0)
    """Optimizer steps."""
    samples: int = Field(default=0, ge=0)
    """Sequences seen."""
    tokens: int = Field(default=0, ge=0)
    """Tokens seen."""


class TrainingState(Frozen):
    """What a run needs to continue, besides its counters: see `mdsp.checkpoint.counters`."""

    data: int = Field(gt=0)
    """Data-parallel degree of the run, and of the optimizer files that are per rank."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Format of the compute."""
    optimizer: str
    """Kind of optimizer."""
    zero_stage: int = Field(ge=0, le=1)
    """ZeRO stage of the optimizer files."""
    optimizer_form: Literal["per_rank", "universal"] = "per_rank"
    """per_rank: the engine's own files, for just this layout. universal: a file per parameter and state below `zero`
    (see `mdsp.checkpoint.universal`), for any layout."""
    global_batch: int = Field(gt=0)
    """Samples per optimizer step."""
    best_eval_loss: float | None = None
    """Lowest evaluation loss so far."""
    wandb_run_id: str | None = None
    """The W&B run whose chart continues."""
    skipped_steps: int = Field(default=0, ge=0)
    """Steps whose update was not applied."""
    bad_steps: int = Field(default=0, ge=0)
    """How many of the last steps in a row."""
    recent_losses: tuple[float, ...] = ()
    """Losses that a spike is judged by."""
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """Ranges `[start, stop)` of the sample order that the run leaves out."""


class Manifest(Frozen):
    """Everything that a reader must know before it opens a shard."""

    format: int
    """Version of this format."""
    complete: bool
    """Always true in a finished checkpoint; there is no manifest before that."""
    what: Literal["weights", "training"]
    """weights: a converted model. training: optimizer state and counters as well."""
    model: ModelConfig
    """The model."""
    tensor: int = Field(gt=0)
    """Tensor-parallel degree of the files."""
    pipeline: int = Field(gt=0)
    """Pipeline-parallel degree of the engine state files; layer files do not depend on it."""
    blocks_per_stage: tuple[int, ...]
    """Transformer blocks of each stage."""
    tensors: tuple[StoredTensor, ...]
    """Every stored tensor, in pipeline order."""
    files: tuple[StoredFile, ...] = ()
    """Further files that belong to the checkpoint: engine state, optimizer shards; of training, the layers' too."""
    hf_files: tuple[StoredFile, ...] = ()
    """Tokenizer and configuration files for an export."""
    origin: Mapping[str, Any] = Field(default_factory=dict)
    """Where the weights came from."""
    made_by: Hash | None = None
    """Of a conversion: identifies source, degrees and types, so that the same command finds its work done."""
    counters: Counters = Counters()
    """Position in training."""
    training: TrainingState | None = None
    """In a checkpoint of training, the rest of its state."""

    def by_parameter(self) -> Mapping[str, tuple[StoredTensor, ...]]:
        """The stored tensors of each parameter, by tensor rank."""
        found: dict[str, list[StoredTensor]] = {}
        for entry in self.tensors:
            found.setdefault(entry.parameter, []).append(entry)
        return {name: tuple(sorted(entries, key=lambda entry: entry.rank)) for name, entries in found.items()}


def _check(manifest: Manifest, source: str) -> None:
    """Every tensor of the model is there once per rank with the shape it must have, and nothing else is."""
    expected = {
        (parameter.name, rank): parameter.local_shape(manifest.tensor)
        for layer in stored_layers(manifest.model)
        for parameter in stored_parameters(manifest.model, layer)
        for rank in range(manifest.tensor)
    }
    for entry in manifest.tensors:
        where = f"{source}: {entry.parameter} of tensor rank {entry.rank}"
        shape = expected.pop((entry.parameter, entry.rank), None)
        if shape is None:
            raise CheckpointError(f"{where} is listed twice, or is no parameter of this model")
        if shape != entry.shape:
            raise CheckpointError(f"{where} has shape {list(entry.shape)}; the model needs {list(shape)}")
    if expected:
        name, rank = next(iter(expected))
        raise CheckpointError(f"{source}: {name} of tensor rank {rank} is missing ({len(expected)} tensors in all)")
    if len(manifest.blocks_per_stage) != manifest.pipeline or sum(manifest.blocks_per_stage) != manifest.model.n_layers:
        raise CheckpointError(
            f"{source}: blocks per stage {list(manifest.blocks_per_stage)} do not fit {manifest.pipeline} stages and "
            f"{manifest.model.n_layers} blocks"
        )


def read_manifest(path: Path) -> tuple[Manifest, Path]:
    """The manifest of a checkpoint (its directory, or the directory of one tag), and the directory of its files.

    Raises:
        CheckpointError: there is none (the checkpoint is unfinished), or it does not describe the model completely.
    """
    directory = tag_directory(path)
    file = directory / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {MANIFEST}: the checkpoint is unfinished and must not be read")
    if file.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes; it is no manifest")
    try:
        manifest = parse_manifest(file.read_bytes(), str(file))
    except RecursionError:
        raise CheckpointError(f"{file} is nested too deeply; it is no manifest") from None
    return manifest, directory


def parse_manifest(data: bytes, source: str) -> Manifest:
    """A manifest from its bytes; `source` names it in messages.

    Raises:
        CheckpointError: not a manifest, of another version, incomplete, or with a path that leaves its directory.
    """
    try:
        values = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON ({error}); the checkpoint is damaged") from None
    if not isinstance(values, dict) or "format" not in values:
        raise CheckpointError(f"{source} is not a manifest of mdsp")
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"{source} has format {values['format']!r}; this mdsp reads format {FORMAT}; use the version that wrote it"
        )
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{source}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
    if not manifest.complete:
        raise CheckpointError(f"{source} says that the checkpoint is unfinished; it must not be read")
    _check(manifest, source)
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as it is written: one line per tensor, so that it can be read and compared."""
    values = manifest.model_dump(mode="json")
    tensors = values.pop("tensors")
    head = json.dumps(values, indent=1)
    lines = ",\n  ".join(json.dumps(entry) for entry in tensors)
    return f'{head[:-2]},\n "tensors": [\n  {lines}\n ]\n}}\n'.encode()


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write the manifest into a tag's directory; everything it names must already be there and durable."""
    _check(manifest, str(directory / MANIFEST))
    write_atomic(directory / MANIFEST, manifest_bytes(manifest))


def stored_path(directory: Path, name: str) -> Path:
    """The file that a manifest in `directory` names.

    Raises:
        CheckpointError: it is missing, or a link leads out of the directory.
    """
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint is damaged")
    root = os.path.realpath(directory)
    if not os.path.realpath(path).startswith(root + os.sep):
        raise CheckpointError(f"{path} is a link out of its checkpoint; it is not followed")
    return path
