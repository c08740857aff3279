"""ParameterBuilder: turns entries of the parameter table into this rank's torch parameters."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor, nn

from mdsp.errors import CheckpointError
from mdsp.model.table import Parameter, ParameterTable, Shard
from mdsp.tensor_parallel.group import TensorGroup


class WeightSource(Protocol):
    """Where the values of parameters come from: a random draw, a Hugging Face directory, a sharded checkpoint."""

    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        """The piece of `parameter` that `rank` of a tensor-parallel group of size `tensor` holds, on the CPU."""
        ...


class RandomWeights:
    """New weights, each a function of (seed, parameter name) alone, so that every layout starts from the same model."""

    # Rows are drawn in blocks with a seed each, so that a rank draws only the rows it keeps. The block length is part
    # of what defines the weights: changing it changes every model that a seed stands for.
    BLOCK_ELEMENTS = 1 << 20

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        shard = parameter.shard(tensor, rank) or Shard(0, 0, parameter.shape[0])
        if parameter.init.std == 0.0:
            shape = list(parameter.shape)
            shape[shard.dim] = shard.stop - shard.start
            return torch.full(shape, parameter.init.constant)
        rows = parameter.shape[0]
        start, stop = (shard.start, shard.stop) if shard.dim == 0 else (0, rows)
        per_block = max(1, self.BLOCK_ELEMENTS // (parameter.numel // rows))
        pieces = []
        for block in range(start // per_block, -(-stop // per_block)):
            first = block * per_block
            drawn = self._draw(parameter, block, min(per_block, rows - first))
            piece = drawn[max(start - first, 0) : stop - first]
            pieces.append(piece if shard.dim == 0 else piece[:, shard.start : shard.stop])
        if not pieces:  # a shard that is nothing but padding
            return torch.zeros(0, *parameter.shape[1:])
        return torch.cat(pieces)

    def _draw(self, parameter: Parameter, block: int, rows: int) -> Tensor:
        key = f"{self.seed}/{parameter.name}/{block}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(rows, *parameter.shape[1:]).normal_(0.0, parameter.init.std, generator=generator)


def entry_of(parameter: nn.Parameter) -> Parameter:
    """The table's entry of a parameter that `ParameterBuilder` built."""
    entry = parameter.entry  # type: ignore[attr-defined]  # torch's parameters take attributes, and type none
    assert isinstance(entry, Parameter)
    return entry


class ParameterBuilder:
    """Builds this rank's parameters by name: local shape, padding, values, and the marks that the engine reads.

    Each built parameter carries its table entry as `.entry`, and `.tensor_model_parallel` (DeepSpeed counts only
    marked parameters on every tensor rank when it computes the gradient norm).
    """

    def __init__(
        self,
        table: ParameterTable,
        group: TensorGroup,
        source: WeightSource,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.table = table
        self.group = group
        self.source = source
        self.dtype = dtype
        self.device = device or torch.device("cpu")

    def build_optional(self, name: str) -> nn.Parameter | None:
        """The parameter, or None when this model has no such parameter (a bias that is switched off)."""
        return self.build(name) if name in self.table.by_name else None

    def build(self, name: str) -> nn.Parameter:
        entry = self.table.by_name[name]
        value = self.source.local_tensor(entry, self.group.size, self.group.rank)
        local = torch.zeros(entry.local_shape(self.group.size), dtype=self.dtype, device=self.device)
        expected = list(local.shape)
        shard = entry.shard(self.group.size, self.group.rank)
        if shard is not None:
            expected[shard.dim] = shard.stop - shard.start
        if list(value.shape) != expected:
            raise CheckpointError(f"{name}: the source gave shape {list(value.shape)}, the model needs {expected}")
        local[tuple(slice(0, length) for length in value.shape)] = value.to(self.device, self.dtype)
        parameter = nn.Parameter(local)
        parameter.entry = entry  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = entry.is_split(self.group.size)  # type: ignore[attr-defined]
        return parameter
