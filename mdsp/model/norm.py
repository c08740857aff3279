"""LayerNorm and RMSNorm over the hidden dimension, or over heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdsp.model.config import ModelConfig
from mdsp.tensor_parallel.collectives import copy_to, reduce_from
from mdsp.tensor_parallel.parameters import ParameterBuilder


class Norm(nn.Module):
    """LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias. RMSNorm: x / sqrt(mean(x^2) + eps) * weight.

    Statistics are computed in fp32. With `norm_unit_offset` the factor is 1 + weight.
    """

    def __init__(self, builder: ParameterBuilder, name: str, config: ModelConfig, kind: str | None = None) -> None:
        super().__init__()
        self.kind = kind or config.norm
        self.eps = config.norm_eps
        self.unit_offset = config.norm_unit_offset
        self.weight = builder.build(f"{name}.weight")
        self.bias = builder.build_optional(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        if self.kind == "layernorm":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, self.unit_offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; rounds as Hugging Face models do."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, 1.0 + weight if unit_offset else weight, eps)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:  # Gemma multiplies before it rounds
        return (normalised * (1.0 + weight.float())).to(x.dtype)
    return weight * normalised.to(x.dtype)


class HeadwiseNorm(nn.Module):
    """RMSNorm on queries or keys: over each head ("head", Qwen 3), or over all heads together ("full", OLMo 2)."""

    def __init__(self, builder: ParameterBuilder, name: str, config: ModelConfig, heads: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.full = config.qk_norm == "full"
        self.size = heads * config.head_dim
        self.weight = builder.build(f"{name}.weight")
        self.group = builder.group

    def forward(self, x: Tensor) -> Tensor:
        """[seq, batch, local heads, head_dim] -> the same shape."""
        if not self.full:
            return rms_norm(x, self.weight, self.eps)
        flat = x.flatten(-2)
        squares = flat.float().square().sum(-1, keepdim=True)
        if flat.shape[-1] != self.size:
            # Heads are split over the group: the mean runs over all of them, and every rank's heads depend on it, so
            # the sum is taken in both directions.
            squares = copy_to(reduce_from(squares, self.group), self.group)
        normalised = flat.float() * torch.rsqrt(squares / self.size + self.eps)
        return (self.weight * normalised.to(x.dtype)).view_as(x)
