"""What a block communicates: two all-reduces forward and two backward, of one residual stream each, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mdsp.model.block import Block
from mdsp.model.config import ModelConfig
from mdsp.model.context import ModelContext
from mdsp.model.layers import run_layers
from mdsp.model.table import parameter_table
from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.parameters import ParameterBuilder, RandomWeights
from tests.harness import run_ranks

SEQ, BATCH, HIDDEN = 8, 3, 16
ELEMENTS = SEQ * BATCH * HIDDEN
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": dict(norm="rmsnorm", position="rotary", gated_mlp=True, n_kv_heads=1, activation="silu", qkv_bias=False),
    "parallel": dict(residual="parallel", shared_norm=True, position="rotary"),
}
NAMES = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


class Counted:
    """Counts the calls of torch.distributed itself, and the elements of the larger side of each."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        for name, kind in NAMES.items():
            setattr(dist, name, self._counting(getattr(dist, name), kind))

    def _counting(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[kind] += 1
            self.elements[kind] += max(value.numel() for value in args if torch.is_tensor(value))
            return function(*args, **kwargs)

        return call

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counts since the last call."""
        found = dict(self.calls), dict(self.elements)
        self.calls.clear()
        self.elements.clear()
        return found


def _traffic(sequence_parallel: bool, recompute: Any) -> dict[str, list[tuple[dict[str, int], dict[str, int]]]]:
    """Per kind of model: forward and backward, counted at torch.distributed, and the same as the group has recorded."""
    counted = Counted()
    found = {}
    for kind, options in OPTIONS.items():
        config = ModelConfig(n_layers=1, hidden_size=HIDDEN, n_heads=4, vocab_size=100, **options)
        group = TensorGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, sequence_parallel)
        context = ModelContext(config, group, recompute=recompute)
        block = Block(ParameterBuilder(parameter_table(config), group, RandomWeights(0)), 0, context)
        x = torch.randn(SEQ // (group.size if sequence_parallel else 1), BATCH, HIDDEN, requires_grad=True)
        counts = []
        y = run_layers([block], x, context, training=True)
        counts.append(counted.take())
        recorded = [(dict(group.traffic.calls), dict(group.traffic.elements))]
        group.traffic.clear()
        y.sum().backward()
        counts.append(counted.take())
        recorded.append((dict(group.traffic.calls), dict(group.traffic.elements)))
        found[kind] = [*counts, *recorded]
    return found


def _expected(**calls: int) -> tuple[dict[str, int], dict[str, int]]:
    return calls, {kind: count * ELEMENTS for kind, count in calls.items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_two_all_reduces_each_way(size: int, recompute: str) -> None:
    """Selective recomputation repeats the attention core, which lies between them. MQA adds none: once per step."""
    wanted = _expected(all_reduce=2)
    for rank in run_ranks(_traffic, size, False, recompute):
        for kind, (forward, backward, *recorded) in rank.items():
            # A parallel residual reads one norm in both branches; each branch is still its own pair of matrices.
            assert forward == wanted, kind
            assert backward == wanted, kind
            assert recorded == [forward, backward], kind


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism_moves_as_much(size: int) -> None:
    """Each all-reduce becomes a reduce-scatter and an all-gather; backward, the two inputs are gathered again."""
    for rank in run_ranks(_traffic, size, True, "none"):
        for kind, (forward, backward, *recorded) in rank.items():
            assert forward == _expected(all_gather=2, reduce_scatter=2), kind
            assert backward == _expected(all_gather=4, reduce_scatter=2), kind
            assert recorded == [forward, backward], kind


def test_full_recomputation_repeats_the_forward_pass() -> None:
    """At most the two all-reduces of a second forward pass are added to the backward pass."""
    for rank in run_ranks(_traffic, 2, False, "full"):
        for kind, (forward, backward, *recorded) in rank.items():
            assert forward == _expected(all_reduce=2), kind
            assert backward[0]["all_reduce"] in (3, 4), kind
            assert recorded == [forward, backward], kind
