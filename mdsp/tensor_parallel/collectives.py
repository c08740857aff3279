"""The conjugate collectives of tensor parallelism as autograd functions.

Each forward has the transposed communication as its backward (Shoeybi et al. 2019, f and g; Korthikanti et al. 2022,
g-bar). `seq` is dimension 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mdsp.tensor_parallel.group import TensorGroup


def all_reduce(x: Tensor, group: TensorGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or other `op`) of `x` over the group, in place."""
    group.traffic.count("all_reduce", x.numel())
    with group.traffic.blocking():
        dist.all_reduce(x, op=op, group=group.process_group)
    return x


def all_gather_sequence(x: Tensor, group: TensorGroup) -> Tensor:
    """[seq / tp, ...] on every rank -> [seq, ...] on every rank."""
    whole = torch.empty((x.shape[0] * group.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    group.traffic.count("all_gather", whole.numel())
    with group.traffic.blocking():
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group.process_group)
    return whole


def reduce_scatter_sequence(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial sums [seq, ...] on every rank -> this rank's [seq / tp, ...] of the sum."""
    part = torch.empty((x.shape[0] // group.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
    group.traffic.count("reduce_scatter", x.numel())
    with group.traffic.blocking():
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group.process_group)
    return part


def sequence_slice(x: Tensor, group: TensorGroup) -> Tensor:
    """This rank's [seq / tp, ...] of a replicated [seq, ...]; no communication."""
    length = x.shape[0] // group.size
    return x[group.rank * length : (group.rank + 1) * length]


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(grad, ctx.group), None


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """x, whose gradient is the sum of the ranks' gradients (f)."""
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum of the ranks' partial `x`, computed in place; each rank's gradient is that of the sum (g)."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def reduce_output(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial sums [seq, batch, hidden] -> the residual stream: whole, or sliced along the sequence (g or g-bar)."""
    if group.splits_sequence:
        return _ReduceScatterSequence.apply(x, group)
    return reduce_from(x, group)
