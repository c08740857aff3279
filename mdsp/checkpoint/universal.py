"""DeepSpeed's universal checkpoint: master weights and optimizer state per parameter, whole, whatever the layout.

    global_stepN_universal/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    global_stepN_universal/zero/optimizer_state.pt
    global_stepN_universal/mp_rank_*_model_states.pt

The format is DeepSpeed's (`deepspeed.checkpoint.ds_to_universal`); the conversion is ours, because DeepSpeed's runs the
pickles that it reads, knows Adam only, and holds all optimizer state of a stage in memory. Every rank converts some of
the parameters, one tensor at a time, out of memory-mapped files.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdsp.checkpoint.atomic import write_atomic
from mdsp.checkpoint.engine_io import read_file, write_file
from mdsp.checkpoint.hashing import file_hash
from mdsp.checkpoint.layout import MANIFEST, optimizer_file, state_file
from mdsp.checkpoint.manifest import Manifest, StoredFile
from mdsp.checkpoint.rotation import SAVING_PREFIX, UNIVERSAL_SUFFIX, publish_tree
from mdsp.errors import CheckpointError
from mdsp.model.config import ModelConfig
from mdsp.model.table import FIRST_BLOCK_LAYER, Parameter, parameter_table

TIED_KEY = "embedding"
"""Under which DeepSpeed's PipelineModule keeps the module that two stages share."""
DESCRIPTION = "universal.json"
MASTER_WEIGHT = "fp32"


def engine_name(parameter: Parameter) -> str:
    """What the engine calls a parameter: by the global index of its layer, so the same at every number of stages."""
    owner = f"tied_modules.{TIED_KEY}" if parameter.tied_layers else str(parameter.layer)
    return f"{owner}.{parameter.attribute}"


def universal_checkpoint_info(config: ModelConfig, tensor: int) -> dict[str, Any]:
    """What DeepSpeed's own converter needs to know about how tensor parallelism splits each parameter.

    It matches by regular expression; here each matches one name.
    """
    replicated, columns, vocabulary, tied = [], [], [], []
    for parameter in parameter_table(config):
        pattern = f"{re.escape(engine_name(parameter))}$"
        if parameter.tied_layers:
            tied.append(pattern)
        if parameter.padded_rows:
            vocabulary.append(pattern)
        elif not parameter.is_split(tensor):
            replicated.append(pattern)
        elif parameter.split_dim == 1:
            columns.append(pattern)
    return {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": config.vocab_size,
        "vocabulary_parameter_patterns": vocabulary,
        "pipeline_replicated_parameter_patterns": tied,
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": columns,
        "parameter_to_average_patterns": [],
        "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_with_sub_params": [],
    }


@dataclass(frozen=True)
class _Fragment:
    """Where one rank's optimizer file holds a part of a parameter."""

    state: dict[str, Tensor]
    """Flat tensors of the part, `fp32` and the optimizer's own."""
    step: Any
    """The optimizer's step count, None when it has none."""


class OptimizerShards:
    """The optimizer files of a training checkpoint, opened when needed and left in their files."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        assert manifest.training is not None
        self.manifest = manifest
        self._directory = directory
        self._data = manifest.training.data
        self._precision = manifest.training.precision
        bounds = [FIRST_BLOCK_LAYER + count for count in accumulate(manifest.blocks_per_stage)]
        self._stage_ends = bounds[:-1]
        self._open = functools.lru_cache(maxsize=64)(self._read)

    def _read(self, data: int, stage: int, tensor: int) -> dict[str, Any]:
        name = optimizer_file(self._precision, data, stage * self.manifest.tensor + tensor)
        found = read_file(self._directory / name, mmap=True)
        try:
            state = found["optimizer_state_dict"]
            base = state["base_optimizer_state"]
            if not isinstance(base["state"], dict):
                raise TypeError
        except (KeyError, TypeError):
            raise CheckpointError(
                f"{self._directory / name} holds no ZeRO-1 optimizer state in DeepSpeed's rigid form; it can only be "
                f"resumed at the layout that it was saved at"
            ) from None
        assert isinstance(state, dict)
        return state

    def global_state(self) -> dict[str, Any]:
        """What all optimizer files share: loss scale, clipping, hyperparameters."""
        state = self._open(0, 0, 0)
        sharded = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
        shared = {key: value for key, value in state.items() if key not in sharded}
        return {**shared, "param_groups": state["base_optimizer_state"]["param_groups"]}

    def _fragment(self, name: str, data: int, stage: int, tensor: int) -> _Fragment | None:
        state = self._open(data, stage, tensor)
        for group, mapping in enumerate(state["param_slice_mappings"]):
            if name not in mapping:
                continue
            start, numel = mapping[name].start, mapping[name].numel
            flat = state["single_partition_of_fp32_groups"][group]
            base = state["base_optimizer_state"]
            own = base["state"].get(base["param_groups"][group]["params"][0], {})
            parts = {MASTER_WEIGHT: flat}
            parts |= {
                key: value
                for key, value in own.items()
                if isinstance(value, Tensor) and value.dim() and value.numel() >= flat.numel()
            }
            return _Fragment({key: value[start : start + numel] for key, value in parts.items()}, own.get("step"))
        return None

    def whole(self, parameter: Parameter) -> tuple[dict[str, Tensor], Any]:
        """({state: the unsharded tensor, without vocabulary padding}, step) of a parameter.

        Raises:
            CheckpointError: the files do not hold all of it.
        """
        degree = self.manifest.tensor
        stage = sum(parameter.layer >= end for end in self._stage_ends)
        ranks = range(degree) if parameter.padded_rows or parameter.is_split(degree) else range(1)
        local: dict[str, list[Tensor]] = {}
        step = None
        for rank in ranks:
            found = [self._fragment(engine_name(parameter), data, stage, rank) for data in range(self._data)]
            parts = [fragment for fragment in found if fragment is not None]
            for key in parts[0].state if parts else ():
                flat = torch.cat([part.state[key] for part in parts])
                local.setdefault(key, []).append(self._shaped(flat, parameter))
            step = parts[0].step if parts else None
        if MASTER_WEIGHT not in local or any(len(pieces) != len(ranks) for pieces in local.values()):
            raise CheckpointError(f"{self._directory}: the optimizer files do not hold {parameter.name}")
        dim = (parameter.split_dim or 0) if len(ranks) > 1 else 0
        whole = {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) for key, pieces in local.items()}
        if parameter.padded_rows:
            whole = {key: value[: parameter.shape[0]] for key, value in whole.items()}
        return whole, step

    def _shaped(self, flat: Tensor, parameter: Parameter) -> Tensor:
        shape = parameter.local_shape(self.manifest.tensor)
        if flat.numel() != torch.Size(shape).numel():
            raise CheckpointError(
                f"{self._directory}: the optimizer files hold {flat.numel()} elements of {parameter.name}, not of "
                f"shape {list(shape)}"
            )
        return flat.view(shape)


def universal_directory(checkpoint: Path) -> Path:
    """Where the universal form of a checkpoint lies."""
    return checkpoint.with_name(checkpoint.name + UNIVERSAL_SUFFIX)


def read_description(checkpoint: Path) -> tuple[StoredFile, ...] | None:
    """The files of the universal form of a checkpoint, None when there is no finished one of just this checkpoint."""
    path = universal_directory(checkpoint) / DESCRIPTION
    try:
        values = json.loads(path.read_bytes())
        files = tuple(StoredFile.model_validate(file) for file in values["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if values.get("source") == file_hash(checkpoint / MANIFEST) else None


def _convert_share(directory: Path, manifest: Manifest, root: Path, rank: int, ranks: int) -> list[StoredFile]:
    shards = OptimizerShards(directory, manifest)
    written = []

    def store(value: Any, name: str) -> None:
        written.append(write_file(value, root / name, name).stored)

    by_size = sorted(parameter_table(manifest.model), key=lambda p: (-p.numel, p.name))
    for parameter in by_size[rank::ranks]:
        folder = f"zero/{engine_name(parameter)}"
        (root / folder).mkdir(parents=True, exist_ok=True)
        whole, step = shards.whole(parameter)
        for key, value in whole.items():
            described: dict[str, Any] = {"param": value.clone()}
            if parameter.padded_rows:
                described["vocab_tensor"] = True
            if parameter.split_dim is not None:
                described["cat_dim"] = parameter.split_dim
            store(described, f"{folder}/{key}.pt")
        if step is not None:
            store(step, f"{folder}/step.pt")
    if rank == 0:
        store(shards.global_state(), "zero/optimizer_state.pt")
        for index in range(manifest.tensor * manifest.pipeline):
            name = state_file(index)
            store(read_file(directory / name), name)
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
        (root / "zero").mkdir(parents=True, exist_ok=True)
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
