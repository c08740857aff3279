"""A small model's table and random whole tensors, from which tests build layers of any tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdsp.model.config import ModelConfig
from mdsp.model.table import parameter_table
from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.parameters import ParameterBuilder
from tests.engine.ranks import Chunks

FIELDS: Mapping[str, Any] = dict(
    n_layers=1, hidden_size=12, n_heads=4, head_dim=3, ffn_size=20, vocab_size=201, gated_mlp=True, tied_head=False
)
SEQ, BATCH = 8, 3


def whole_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every parameter, drawn at random."""
    generator = torch.Generator().manual_seed(7)
    table = parameter_table(ModelConfig(**FIELDS))
    return {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in table}


def world_group(sequence_parallel: bool) -> TensorGroup:
    """All ranks of the job as one tensor-parallel group."""
    return TensorGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, sequence_parallel)


def builder_for(group: TensorGroup, dtype: torch.dtype = torch.float32) -> ParameterBuilder:
    """Builds layers from `whole_tensors`."""
    return ParameterBuilder(parameter_table(ModelConfig(**FIELDS)), group, Chunks(whole_tensors(), FIELDS), dtype)


def sequence_piece(x: Tensor, group: TensorGroup) -> Tensor:
    """What this rank holds of a residual stream [seq, batch, hidden]."""
    return x.chunk(group.size)[group.rank] if group.splits_sequence else x
