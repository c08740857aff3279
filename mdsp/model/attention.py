"""Causal self-attention with heads split over the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mdsp.model.context import ModelContext
from mdsp.model.norm import HeadwiseNorm
from mdsp.model.positions import alibi_slopes, apply_rotary, attention_bias, rotary_tables
from mdsp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from mdsp.tensor_parallel.parameters import ParameterBuilder
from mdsp.tensor_parallel.random import Moment


class Attention(nn.Module):
    """softmax(scale Q K^T + mask) V, then the output projection.

    Query heads are split over the group. Key/value heads are split too where their number allows it; otherwise every
    rank keeps all of them, computes those that its queries read, and gradients are summed over the group.
    """

    def __init__(self, builder: ParameterBuilder, index: int, context: ModelContext) -> None:
        super().__init__()
        config, group = context.config, context.group
        name = f"blocks.{index}.attention"
        self.config, self.context, self.site = config, context, name
        self.query = ColumnParallelLinear(builder, f"{name}.query")
        self.key = ColumnParallelLinear(builder, f"{name}.key")
        self.value = ColumnParallelLinear(builder, f"{name}.value")
        self.query_norm = self.key_norm = None
        if config.qk_norm != "none":
            self.query_norm = HeadwiseNorm(builder, f"{name}.query_norm", config, config.n_heads)
            self.key_norm = HeadwiseNorm(builder, f"{name}.key_norm", config, config.n_kv_heads)
        self.output = RowParallelLinear(builder, f"{name}.output")

        self.local_heads = config.n_heads // group.size
        first_query = group.rank * self.local_heads
        queries_per_kv = config.n_heads // config.n_kv_heads
        needed = [head // queries_per_kv for head in range(first_query, first_query + self.local_heads)]
        stored_first, stored = 0, config.n_kv_heads
        if config.n_kv_heads % group.size == 0:
            stored = config.n_kv_heads // group.size
            stored_first = group.rank * stored
        self.first_kv, self.last_kv = needed[0] - stored_first, needed[-1] - stored_first
        self.all_kv_used = (self.first_kv, self.last_kv) == (0, stored - 1)
        # For each local query head, its key/value head among those computed; None where head i reads head i.
        reads = [head - needed[0] for head in needed]
        self.kv_of_query = None if reads == list(range(len(reads))) else reads
        self.regular = len({reads.count(head) for head in set(reads)}) == 1

        slopes = alibi_slopes(config.n_heads)[first_query : first_query + self.local_heads]
        self.slopes = torch.tensor(slopes) if config.position == "alibi" else None
        windowed = config.sliding_window_layers == "all" or index % 2 == 0
        self.window = config.sliding_window if windowed else None
        self.scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same shape."""
        q, k, v = self._project(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
            if k.shape[2] != v.shape[2]:  # the norm ran over all heads; only now can the unused ones go
                k = k[:, :, self.first_kv : self.last_kv + 1]
        if self.config.position == "rotary":
            cos, sin = self.context.cached(("rotary", q.shape[0], q.device, q.dtype), self._rotary_tables, q)
            q = apply_rotary(q, cos, sin, self.config.rotary_interleaved)
            k = apply_rotary(k, cos, sin, self.config.rotary_interleaved)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))  # [batch, heads, seq, head_dim]
        if self.context.recompute == "selective" and self.training and torch.is_grad_enabled():
            moment = self.context.streams.moment
            out = checkpoint(self._core_at, moment, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._core(q, k, v)
        return self.output(out.permute(2, 0, 1, 3).flatten(-2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [seq, batch, heads, head_dim]."""
        key_rows = value_rows = slice(None)
        if not self.all_kv_used:
            value_rows = slice(self.first_kv * self.config.head_dim, (self.last_kv + 1) * self.config.head_dim)
            if self.config.qk_norm != "full":  # that norm needs every key head
                key_rows = value_rows
        biases = (self.query.bias, self.key.bias, self.value.bias)
        q, k, v = column_parallel(
            x,
            (self.query.weight, self.key.weight[key_rows], self.value.weight[value_rows]),
            (
                biases[0],
                None if biases[1] is None else biases[1][key_rows],
                None if biases[2] is None else biases[2][value_rows],
            ),
            self.context.group,
        )
        return tuple(tensor.unflatten(-1, (-1, self.config.head_dim)) for tensor in (q, k, v))

    def _rotary_tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(self.config, like.shape[0], like.device, like.dtype)

    def _bias(self, like: Tensor) -> Tensor | None:
        return attention_bias(like.shape[2], self.window, self.slopes, like.device, like.dtype)

    def _core_at(self, moment: Moment, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with self.context.streams.at(moment):
            return self._core(q, k, v)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention core: q [batch, heads, seq, head_dim], k and v with their own heads -> like q."""
        if self.kv_of_query is not None and not (self.regular and q.device.type == "cuda"):
            k, v = k[:, self.kv_of_query], v[:, self.kv_of_query]
        bias = self.context.cached(("bias", self.window, q.shape[2], q.device, q.dtype), self._bias, q)
        dropout = self.config.attention_dropout if self.training else 0.0
        if dropout:
            self.context.streams.prepare(f"{self.site}.core", split=True)
        if self.config.attention_softcap is not None:
            return self._capped(q, k, v, bias, self.config.attention_softcap, dropout)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=dropout,
            is_causal=bias is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cap: float, dropout: float) -> Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = cap * torch.tanh(q @ k.transpose(-2, -1) * self.scale / cap)
        if bias is None:
            bias = torch.full((q.shape[2], q.shape[2]), -torch.inf, device=q.device, dtype=q.dtype).triu(1)
        probabilities = torch.softmax((scores + bias).float(), -1).to(q.dtype)
        return F.dropout(probabilities, dropout, training=dropout > 0) @ v
