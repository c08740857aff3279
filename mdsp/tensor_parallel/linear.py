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


class _Linears(Function):
    """y_i = x W_i^T + b_i for several (W_i, b_i) that read one x, with one reduction of dx for all of them.

    The reduction of dx is in flight while dW is computed; with sequence parallelism, x is gathered again in the
    backward pass instead of being kept whole (Korthikanti et al. 2022, section 4.2.2). Without a group there is nothing
    to reduce, and dW = dy^T x still comes out in the layout of W, which saves the copy that autograd makes of it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TensorGroup | None, count: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.has_bias = group, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        whole = all_gather_sequence(x, group) if group is not None and group.splits_sequence else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group: TensorGroup | None = ctx.group
        whole = all_gather_sequence(x, group) if group is not None and group.splits_sequence else x
        # Flattened once: gradients of attention come transposed, and every flatten would copy them.
        rows = [grad.flatten(0, -2) for grad in grads]
        dx = rows[0] @ weights[0]
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            dx.addmm_(grad, weight)
        dx = dx.view_as(whole)
        reduction = None if group is None else _start_reduction(dx, group)
        flat = whole.flatten(0, -2)
        weight_grads = [grad.t() @ flat for grad in rows]
        bias_grads = [grad.sum(0) if has_bias else None for grad, has_bias in zip(rows, ctx.has_bias, strict=True)]
        if group is not None and reduction is not None:
            dx, work = reduction
            with group.traffic.blocking():
                work.wait()
        return (dx, None, None, *weight_grads, *bias_grads)


def _start_reduction(dx: Tensor, group: TensorGroup) -> tuple[Tensor, dist.Work]:
    """Begin summing dx over the group (each rank keeps its slice with sequence parallelism): (result, handle)."""
    if not group.splits_sequence:
        group.traffic.count("all_reduce", dx.numel())
        return dx, dist.all_reduce(dx, group=group.process_group, async_op=True)
    group.traffic.count("reduce_scatter", dx.numel())
    out = torch.empty((dx.shape[0] // group.size, *dx.shape[1:]), dtype=dx.dtype, device=dx.device)
    return out, dist.reduce_scatter_tensor(out, dx, group=group.process_group, async_op=True)


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
    return _Linears.apply(x, group if group.size > 1 else None, len(weights), *weights, *biases)


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
            return _Linears.apply(x, None, 1, self.weight, self.bias)[0]
        (partial,) = _Linears.apply(x, None, 1, self.weight, None)
        y = reduce_output(partial, self.group)
        return y if self.bias is None else y + self.bias
