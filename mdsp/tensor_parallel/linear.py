"""ColumnParallelLinear and RowParallelLinear: the two halves of every matrix pair in a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mdsp.tensor_parallel.collectives import all_gather_sequence, reduce_output
from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.parameters import ParameterBuilder


class _ColumnParallel(Function):
    """y_i = x W_i^T + b_i for several (W_i, b_i) that read one x, with one reduction of dx for all of them.

    The reduction of dx is in flight while dW is computed; with sequence parallelism, x is gathered again in the
    backward pass instead of being kept whole (Korthikanti et al. 2022, section 4.2.2).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.has_bias = group, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        whole = all_gather_sequence(x, group) if group.splits_sequence else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group: TensorGroup = ctx.group
        whole = all_gather_sequence(x, group) if group.splits_sequence else x
        dx = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            dx = torch.addmm(dx.flatten(0, -2), grad.flatten(0, -2), weight).view_as(dx)
        group.traffic.count("reduce_scatter" if group.splits_sequence else "all_reduce", dx.numel())
        if group.splits_sequence:
            out = torch.empty_like(x)
            work = dist.reduce_scatter_tensor(out, dx, group=group.process_group, async_op=True)
        else:
            out = dx
            work = dist.all_reduce(out, group=group.process_group, async_op=True)
        flat = whole.flatten(0, -2)
        weight_grads = [grad.flatten(0, -2).t() @ flat for grad in grads]
        bias_grads = [
            grad.flatten(0, -2).sum(0) if has_bias else None for grad, has_bias in zip(grads, ctx.has_bias, strict=True)
        ]
        with group.traffic.blocking():
            work.wait()
        return (out, None, None, *weight_grads, *bias_grads)


def column_parallel(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: TensorGroup
) -> tuple[Tensor, ...]:
    """One process: y_i = x W_i^T + b_i.

    Args:
        x: [seq, batch, in], or [seq / tp, batch, in] with sequence parallelism.
        weights: each [out_i / tp, in], this rank's rows.
        biases: each [out_i / tp] or None.

    Returns:
        Each [seq, batch, out_i / tp]. The gradient of x is summed over the group: once, whatever the number of outputs.
    """
    if group.size == 1:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return _ColumnParallel.apply(x, group, len(weights), *weights, *biases)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W and b split by rows (outputs) over the group.

    Layers that read the same input (query, key, value; gate, up) are computed together by `column_parallel`.
    """

    def __init__(self, builder: ParameterBuilder, name: str) -> None:
        super().__init__()
        self.weight = builder.build(f"{name}.weight")
        self.bias = builder.build_optional(f"{name}.bias")
        self.group = builder.group

    def forward(self, x: Tensor) -> Tensor:
        """[seq (/ tp), batch, in] -> [seq, batch, out / tp]."""
        return column_parallel(x, (self.weight,), (self.bias,), self.group)[0]


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W split by columns (inputs): partial products are summed, then the bias is added, once."""

    def __init__(self, builder: ParameterBuilder, name: str) -> None:
        super().__init__()
        self.weight = builder.build(f"{name}.weight")
        self.bias = builder.build_optional(f"{name}.bias")
        self.group = builder.group

    def forward(self, x: Tensor) -> Tensor:
        """[seq, batch, in / tp] -> [seq, batch, out], or [seq / tp, batch, out] with sequence parallelism."""
        if self.group.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_output(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias
