"""One transformer block: attention and MLP around the residual stream, with the options that HF families need."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from mdsp.model.attention import Attention
from mdsp.model.context import ModelContext
from mdsp.model.norm import Norm
from mdsp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from mdsp.tensor_parallel.parameters import ParameterBuilder

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Mlp(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)); the inner width is split over the tensor-parallel group."""

    def __init__(self, builder: ParameterBuilder, index: int, context: ModelContext) -> None:
        super().__init__()
        name = f"blocks.{index}.mlp"
        self.group = context.group
        self.activation = ACTIVATIONS[context.config.activation]
        self.gate = ColumnParallelLinear(builder, f"{name}.gate") if context.config.gated_mlp else None
        self.up = ColumnParallelLinear(builder, f"{name}.up")
        self.down = RowParallelLinear(builder, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same shape."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        weights, biases = (self.gate.weight, self.up.weight), (self.gate.bias, self.up.bias)
        gate, up = column_parallel(x, weights, biases, self.group)
        return self.down(self.activation(gate) * up)


class Block(nn.Module):
    """x + attention, + MLP; see `ModelConfig` for norm placement and residual form."""

    def __init__(self, builder: ParameterBuilder, index: int, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        name = f"blocks.{index}"
        self.context, self.site = context, name
        self.dropout = config.hidden_dropout
        self.multiplier = config.residual_multiplier
        self.parallel = config.residual == "parallel"

        def norm(attribute: str, wanted: bool) -> nn.Module | None:
            return Norm(builder, f"{name}.{attribute}", config) if wanted else None

        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = norm("attention_norm", before)
        self.attention = Attention(builder, index, context)
        self.attention_post_norm = norm("attention_post_norm", after)
        self.mlp_norm = norm("mlp_norm", before and not config.shared_norm)
        self.mlp = Mlp(builder, index, context)
        self.mlp_post_norm = norm("mlp_post_norm", after)

    def _branch(self, out: Tensor, post_norm: nn.Module | None, site: str) -> Tensor:
        if post_norm is not None:
            out = post_norm(out)
        split = self.context.group.splits_sequence
        out = self.context.streams.dropout(out, self.dropout, self.training, f"{self.site}.{site}", split)
        return out if self.multiplier == 1.0 else out * self.multiplier

    def forward(self, x: Tensor) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same shape."""
        attention_in = x if self.attention_norm is None else self.attention_norm(x)
        attended = self._branch(self.attention(attention_in), self.attention_post_norm, "attention")
        if self.parallel:
            mlp_in = attention_in if self.mlp_norm is None else self.mlp_norm(x)
            return x + attended + self._branch(self.mlp(mlp_in), self.mlp_post_norm, "mlp")
        x = x + attended
        mlp_in = x if self.mlp_norm is None else self.mlp_norm(x)
        return x + self._branch(self.mlp(mlp_in), self.mlp_post_norm, "mlp")
