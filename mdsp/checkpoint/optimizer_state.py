"""Reads master weights and optimizer state of a training checkpoint: whole parameters, out of mapped files.

There are two forms on disk: DeepSpeed's ZeRO-1 files, one per rank with its share of flat buffers, and its universal
form (`mdsp.checkpoint.universal`), one file per parameter and state. Neither is ever assembled in memory: a state of a
parameter is a sequence of runs of rows that are views of the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mdsp.checkpoint.checked_files import CheckedFiles
from mdsp.checkpoint.layout import optimizer_file
from mdsp.checkpoint.manifest import Manifest, StoredFile
from mdsp.checkpoint.pieces import Pieces
from mdsp.checkpoint.universal import GLOBAL_STATE, MASTER_WEIGHT, STEP, engine_name, state_folder
from mdsp.errors import CheckpointError
from mdsp.model.table import FIRST_BLOCK_LAYER, Parameter

Runs = tuple[Pieces, ...]
"""A tensor as runs of its rows, one after the other."""


class OptimizerState(Protocol):
    """Master weights and optimizer state of every parameter, unsharded and without vocabulary padding."""

    def states(self, parameter: Parameter) -> dict[str, Runs]:
        """`MASTER_WEIGHT` and the optimizer's own tensors.

        Raises:
            CheckpointError: the files are damaged, or do not hold all of it.
        """
        ...

    def step(self, parameter: Parameter) -> Any:
        """The optimizer's step count, None when it has none."""
        ...

    def global_state(self) -> dict[str, Any]:
        """What belongs to no parameter: loss scale, clipping, hyperparameters."""
        ...

    def bytes_per_element(self) -> int:
        """Bytes of all states for one element of a parameter."""
        ...


def open_optimizer_state(directory: Path, manifest: Manifest, verify: bool) -> OptimizerState:
    """The optimizer state of the training checkpoint in `directory`.

    Args:
        directory: the tag's.
        manifest: its manifest.
        verify: compare every file with its hash before its first use.

    Raises:
        CheckpointError: it is not kept in a form that can be taken apart.
    """
    training = manifest.training
    assert training is not None
    if training.zero_stage != 1:
        raise CheckpointError(
            f"{directory} was saved with zero_optimization.stage {training.zero_stage}, and only stage 1 keeps the "
            f"optimizer state in a form that converts"
        )
    files = CheckedFiles(directory, manifest.files, verify)
    state: OptimizerState
    if training.optimizer_form == "universal":
        state = UniversalState(files, manifest.files)
    else:
        state = OptimizerShards(files, manifest)
    state.bytes_per_element()  # looks into a file: another form is refused before anything is begun
    return state


@dataclass(frozen=True)
class _Fragment:
    """Where one rank's optimizer file holds a part of a parameter."""

    state: dict[str, Tensor]
    """Flat tensors of the part, `MASTER_WEIGHT` and the optimizer's own."""
    step: Any
    """The optimizer's step count, None when it has none."""


class OptimizerShards:
    """ZeRO-1 files, one per rank."""

    def __init__(self, files: CheckedFiles, manifest: Manifest) -> None:
        assert manifest.training is not None
        self._files = files
        self._tensor = manifest.tensor
        self._data = manifest.training.data
        self._precision = manifest.training.precision
        self._stage_ends = [FIRST_BLOCK_LAYER + count for count in accumulate(manifest.blocks_per_stage)][:-1]

    def _name(self, data: int, stage: int, tensor: int) -> str:
        return optimizer_file(self._precision, data, stage * self._tensor + tensor)

    def _state(self, name: str, found: Any) -> dict[str, Any]:
        try:
            state = found["optimizer_state_dict"]
            if not isinstance(state["base_optimizer_state"]["state"], dict):
                raise TypeError
        except (KeyError, TypeError):
            raise CheckpointError(
                f"{self._files.directory / name} holds no ZeRO-1 optimizer state in DeepSpeed's rigid form, the only "
                f"one that converts"
            ) from None
        assert isinstance(state, dict)
        return state

    def _open(self, data: int, stage: int, tensor: int) -> dict[str, Any]:
        name = self._name(data, stage, tensor)
        return self._state(name, self._files.open(name))

    def bytes_per_element(self) -> int:
        """As the protocol says, from the first file."""
        name = self._name(0, 0, 0)
        parts, _ = _parts(self._state(name, self._files.peek(name)), 0)
        return sum(part.element_size() for part in parts.values())

    def global_state(self) -> dict[str, Any]:
        """What all files share."""
        state = self._open(0, 0, 0)
        sharded = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
        shared = {key: value for key, value in state.items() if key not in sharded}
        return {**shared, "param_groups": state["base_optimizer_state"]["param_groups"]}

    def _fragment(self, name: str, data: int, stage: int, tensor: int) -> _Fragment | None:
        state = self._open(data, stage, tensor)
        for group, mapping in enumerate(state["param_slice_mappings"]):
            if name in mapping:
                start, numel = mapping[name].start, mapping[name].numel
                parts, step = _parts(state, group)
                return _Fragment({key: value[start : start + numel] for key, value in parts.items()}, step)
        return None

    def _fragments(self, parameter: Parameter, tensor: int) -> list[_Fragment]:
        """The parts of one tensor rank's share, in order."""
        stage = sum(parameter.layer >= end for end in self._stage_ends)
        found = [self._fragment(engine_name(parameter), data, stage, tensor) for data in range(self._data)]
        parts = [fragment for fragment in found if fragment is not None]
        if not parts or any(part.state.keys() != parts[0].state.keys() for part in parts):
            raise CheckpointError(f"{self._files.directory}: the optimizer files do not hold {parameter.name}")
        return parts

    def step(self, parameter: Parameter) -> Any:
        """The step of the first part; all have the same."""
        return self._fragments(parameter, 0)[0].step

    def states(self, parameter: Parameter) -> dict[str, Runs]:
        """Rows of every tensor rank's share, side by side or one below the other."""
        split = parameter.padded_rows > 0 or parameter.is_split(self._tensor)
        shares = [self._fragments(parameter, rank) for rank in range(self._tensor if split else 1)]
        shape = parameter.local_shape(self._tensor)
        found: dict[str, Runs] = {}
        for key in shares[0][0].state:
            blocks = []
            for parts in shares:
                flat = [part.state[key] for part in parts]
                held = sum(part.numel() for part in flat)
                if held != torch.Size(shape).numel():
                    raise CheckpointError(
                        f"{self._files.directory}: the optimizer files hold {held} elements of {parameter.name}, not "
                        f"of shape {list(shape)}"
                    )
                blocks.append(row_blocks(flat, shape))
            if len(blocks) > 1 and parameter.split_dim == 1:
                found[key] = side_by_side(blocks)
            else:
                whole = Pieces(tuple(block for share in blocks for block in share))
                found[key] = (whole.narrow(0, 0, parameter.shape[0]),)  # without vocabulary padding
        return found


def _parts(state: dict[str, Any], group: int) -> tuple[dict[str, Tensor], Any]:
    """({state: flat tensor}, step) of one parameter group of a file."""
    flat = state["single_partition_of_fp32_groups"][group]
    base = state["base_optimizer_state"]
    own = base["state"].get(base["param_groups"][group]["params"][0], {})
    parts = {MASTER_WEIGHT: flat}
    parts |= {
        key: value
        for key, value in own.items()
        if isinstance(value, Tensor) and value.dim() and value.numel() >= flat.numel()
    }
    return parts, own.get(STEP)


def row_blocks(flat: Sequence[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    """A tensor of `shape` that lies in flat parts, as blocks of its rows; only rows that two parts share are copied."""
    width = torch.Size(shape[1:]).numel()
    blocks: list[Tensor] = []
    begun: list[Tensor] = []
    missing = 0  # elements of the row that is begun
    for part in flat:
        head, rest = part[:missing], part[missing:]
        if missing:
            begun.append(head)
            missing -= head.numel()
            if missing:
                continue
            blocks.append(torch.cat(begun).view(1, *shape[1:]))
        rows = rest.numel() // width
        if rows:
            blocks.append(rest[: rows * width].view(rows, *shape[1:]))
        begun = [rest[rows * width :]]
        missing = (width - begun[0].numel()) % width
    return blocks


def side_by_side(shares: Sequence[Sequence[Tensor]]) -> Runs:
    """`torch.cat([torch.cat(blocks) for blocks in shares], 1)`, in runs of rows within which no share has a seam."""
    joined = [Pieces(tuple(blocks)) for blocks in shares]
    seams = {0} | {end for blocks in shares for end in accumulate(block.shape[0] for block in blocks)}
    return tuple(
        Pieces(tuple(one.narrow(0, start, stop).views[0] for one in joined), 1)
        for start, stop in pairwise(sorted(seams))
    )


class UniversalState:
    """DeepSpeed's universal form: a file per parameter and state."""

    def __init__(self, files: CheckedFiles, stored: tuple[StoredFile, ...]) -> None:
        self._files = files
        self._keys: dict[str, list[str]] = {}
        for file in stored:
            folder, _, name = file.file.rpartition("/")
            self._keys.setdefault(folder, []).append(name.removesuffix(".pt"))

    @classmethod
    def at(cls, directory: Path, stored: tuple[StoredFile, ...]) -> UniversalState:
        """The one in `directory`, whose files have been compared with their hashes."""
        return cls(CheckedFiles(directory, stored, verify=False), stored)

    def keys(self, parameter: Parameter) -> list[str]:
        """States of a parameter: `MASTER_WEIGHT`, the optimizer's own, and perhaps `STEP`."""
        found = self._keys.get(state_folder(parameter), [])
        if MASTER_WEIGHT not in found:
            raise CheckpointError(f"{self._files.directory} does not hold the optimizer state of {parameter.name}")
        return found

    def whole(self, parameter: Parameter, key: str) -> Tensor:
        """One state of a parameter, as a view of its file."""
        tensor = self._files.open(f"{state_folder(parameter)}/{key}.pt")["param"]
        if tuple(tensor.shape) != parameter.shape:
            raise CheckpointError(
                f"{self._files.directory}: {key} of {parameter.name} has shape {list(tensor.shape)}, the model needs "
                f"{list(parameter.shape)}"
            )
        assert isinstance(tensor, Tensor)
        return tensor

    def states(self, parameter: Parameter) -> dict[str, Runs]:
        """Every state in one run."""
        return {key: (Pieces((self.whole(parameter, key),)),) for key in self.keys(parameter) if key != STEP}

    def step(self, parameter: Parameter) -> Any:
        """What its file says."""
        return self._files.open(f"{state_folder(parameter)}/{STEP}.pt") if STEP in self.keys(parameter) else None

    def global_state(self) -> dict[str, Any]:
        """Loss scale and the like."""
        state = self._files.open(GLOBAL_STATE)
        assert isinstance(state, dict)
        return state

    def bytes_per_element(self) -> int:
        """As the protocol says, from the files of the first parameter."""
        folder, keys = next(iter((f, k) for f, k in self._keys.items() if MASTER_WEIGHT in k), ("", []))
        tensors = [self._files.peek(f"{folder}/{key}.pt")["param"] for key in keys if key != STEP]
        return sum(tensor.element_size() for tensor in tensors)
