"""Loading a universal checkpoint into an engine of any layout: each rank reads its own rows of each parameter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from mdsp.checkpoint.manifest import StoredFile
from mdsp.checkpoint.optimizer_state import UniversalState
from mdsp.checkpoint.universal import MASTER_WEIGHT, STEP
from mdsp.model.table import Parameter
from mdsp.tensor_parallel.parameters import entry_of

if TYPE_CHECKING:
    from mdsp.engine.engine import MdspEngine


def local_range(whole: Tensor, parameter: Parameter, tensor: int, rank: int, start: int, numel: int) -> Tensor:
    """Elements `[start, start + numel)` of the row-major local shard of a parameter, vocabulary padding as zeros."""
    shard = parameter.shard(tensor, rank)
    local_shape = parameter.local_shape(tensor)
    if shard is not None:
        whole = whole.narrow(shard.dim, shard.start, shard.stop - shard.start)
    width = torch.Size(local_shape[1:]).numel()
    first, last = start // width, -(-(start + numel) // width)
    rows = whole[first : min(last, whole.shape[0])].reshape(-1)  # only rows that this rank needs leave the file
    found = rows[start - first * width : start - first * width + numel]
    missing = numel - found.numel()
    return torch.cat([found, found.new_zeros(missing)]) if missing else found


def load_universal(engine: MdspEngine, directory: Path, files: tuple[StoredFile, ...]) -> None:
    """Master weights, optimizer state and loss scale into the engine's optimizer, and from there into the model.

    Collective: the model's weights are gathered from the ranks' shares. Hyperparameters stay the configuration's.

    Raises:
        CheckpointError: something is missing or has another shape.
    """
    reader = UniversalState.at(directory, files)
    optimizer = engine.optimizer
    is_bf16 = isinstance(optimizer, BF16_Optimizer)
    groups: list[list[nn.Parameter]] = optimizer.bf16_groups if is_bf16 else optimizer.bit16_groups
    shared = reader.global_state()
    if engine.lr_scheduler is not None:
        for group, saved in zip(optimizer.optimizer.param_groups, shared["param_groups"], strict=True):
            group["lr"] = saved["lr"]
    if not is_bf16:
        clip_grad = optimizer.clip_grad
        optimizer._load_global_state({**optimizer.state_dict(), **_loss_scale(shared)})
        optimizer.clip_grad = clip_grad
    for group, parameters in zip(optimizer.optimizer.param_groups, groups, strict=True):
        _load_group(engine, reader, group["params"][0], parameters, optimizer.optimizer.state)
    optimizer.update_lp_params()


def _loss_scale(state: dict[str, Any]) -> dict[str, Any]:
    """The part of the global state that only means something in fp16."""
    scaler = state.get("loss_scaler")
    return {"loss_scaler": scaler} if state.get("dynamic_loss_scale") else {}


def _load_group(
    engine: MdspEngine, reader: UniversalState, flat: Tensor, parameters: list[nn.Parameter], state: Any
) -> None:
    """One optimizer group: `flat` is this rank's share of the concatenated local parameters."""
    group = engine.module.context.group
    buffers: dict[str, Any] = {}
    for parameter in parameters:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            continue  # this rank's share of the group holds nothing of it
        entry = entry_of(parameter)
        source, target = mapping.lp_fragment_address, mapping.hp_fragment_address
        for key in reader.keys(entry):
            if key == STEP:
                buffers.setdefault(key, reader.step(entry))
                continue
            values = local_range(reader.whole(entry, key), entry, group.size, group.rank, source.start, source.numel)
            if key == MASTER_WEIGHT:
                mapping.get_hp_fragment().data.copy_(values)
            else:
                buffer = buffers.setdefault(key, torch.zeros_like(flat.data))
                buffer.narrow(0, target.start, target.numel).copy_(values)
    if buffers:
        step = buffers.get(STEP)
        if isinstance(step, Tensor):
            buffers[STEP] = step.to(flat.device, copy=True)  # it is counted on, and must not be the file
        state[flat] = buffers
    for parameter in parameters:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            mapping.set_optim_state_fragment(flat, state[flat])
