"""Column- and row-parallel layers against `F.linear` on whole tensors, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mdsp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from tests.harness import run_ranks
from tests.tensor_parallel.builder import BATCH, FIELDS, SEQ, builder_for, sequence_piece, whole_tensors, world_group

HIDDEN, FFN = FIELDS["hidden_size"], FIELDS["ffn_size"]


def _input(width: int, seed: int) -> Tensor:
    return torch.randn(SEQ, BATCH, width, generator=torch.Generator().manual_seed(seed))


def _columns(sequence_parallel: bool) -> dict[str, Tensor | dict[str, int]]:
    group = world_group(sequence_parallel)
    builder = builder_for(group)
    gate, up = (ColumnParallelLinear(builder, f"blocks.0.mlp.{name}") for name in ("gate", "up"))
    x = sequence_piece(_input(HIDDEN, 1), group).clone().requires_grad_()
    a, b = column_parallel(x, (gate.weight, up.weight), (gate.bias, up.bias), group)
    seen = dict(group.traffic.calls)
    (a * _slice(2) + b * _slice(3)).sum().backward()
    alone = gate(sequence_piece(_input(HIDDEN, 1), group))
    return {
        "a": a.detach(), "b": b.detach(), "alone": alone.detach(), "dx": x.grad, "dw": gate.weight.grad,
        "db": gate.bias.grad, "dw2": up.weight.grad, "db2": up.bias.grad, "calls": seen,
    }  # fmt: skip


def _slice(seed: int) -> Tensor:
    return _input(FFN, seed).chunk(dist.get_world_size(), -1)[dist.get_rank()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_columns(size: int, sequence_parallel: bool) -> None:
    """Two matrices that read one input: outputs, and gradients of input, weights and biases."""
    ranks = run_ranks(_columns, size, sequence_parallel)
    whole = whole_tensors()
    names = [f"blocks.0.mlp.{name}" for name in ("gate", "up")]
    weights = [whole[f"{name}.weight"].requires_grad_() for name in names]
    biases = [whole[f"{name}.bias"].requires_grad_() for name in names]
    x = _input(HIDDEN, 1).requires_grad_()
    a, b = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    (a * _input(FFN, 2) + b * _input(FFN, 3)).sum().backward()
    close = torch.testing.assert_close
    close(torch.cat([r["a"] for r in ranks], -1), a.detach())
    close(torch.cat([r["alone"] for r in ranks], -1), a.detach())
    close(torch.cat([r["b"] for r in ranks], -1), b.detach())
    for key, tensor in (("dw", weights[0]), ("db", biases[0]), ("dw2", weights[1]), ("db2", biases[1])):
        close(torch.cat([r[key] for r in ranks]), tensor.grad)
    if sequence_parallel:
        close(torch.cat([r["dx"] for r in ranks]), x.grad)
    else:
        for r in ranks:
            close(r["dx"], x.grad)
    assert all(r["calls"] == ({"all_gather": 1} if sequence_parallel else {}) for r in ranks)


def _rows(sequence_parallel: bool) -> dict[str, Tensor]:
    group = world_group(sequence_parallel)
    down = RowParallelLinear(builder_for(group), "blocks.0.mlp.down")
    x = _slice(4).clone().requires_grad_()
    y = down(x)
    (y * sequence_piece(_input(HIDDEN, 5), group)).sum().backward()
    return {"y": y.detach(), "dx": x.grad, "dw": down.weight.grad, "db": down.bias.grad}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rows(size: int, sequence_parallel: bool) -> None:
    """Partial products are summed; the bias is added once, not once per rank."""
    ranks = run_ranks(_rows, size, sequence_parallel)
    whole = whole_tensors()
    weight, bias = (whole[f"blocks.0.mlp.down.{kind}"].requires_grad_() for kind in ("weight", "bias"))
    x = _input(FFN, 4).requires_grad_()
    y = F.linear(x, weight, bias)
    (y * _input(HIDDEN, 5)).sum().backward()
    close = torch.testing.assert_close
    close(torch.cat([r["dx"] for r in ranks], -1), x.grad)
    close(torch.cat([r["dw"] for r in ranks], -1), weight.grad)
    if sequence_parallel:
        close(torch.cat([r["y"] for r in ranks]), y.detach())
        close(sum(r["db"] for r in ranks), bias.grad)  # each rank has its tokens' part
    else:
        for r in ranks:
            close(r["y"], y.detach())
            close(r["db"], bias.grad)


def test_one_rank_is_a_plain_linear_layer() -> None:
    from mdsp.tensor_parallel.group import TensorGroup

    whole, builder = whole_tensors(), builder_for(TensorGroup())
    x = _input(HIDDEN, 1)
    up, down = ColumnParallelLinear(builder, "blocks.0.mlp.up"), RowParallelLinear(builder, "blocks.0.mlp.down")
    expected = F.linear(x, whole["blocks.0.mlp.up.weight"], whole["blocks.0.mlp.up.bias"])
    assert torch.equal(up(x), expected)
    assert torch.equal(
        down(expected), F.linear(expected, whole["blocks.0.mlp.down.weight"], whole["blocks.0.mlp.down.bias"])
    )
