"""Initial weights: each parameter a function of (seed, name) alone, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mdsp.errors import CheckpointError
from mdsp.model.config import ModelConfig
from mdsp.model.table import Init, Parameter, parameter_table
from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.parameters import ParameterBuilder, RandomWeights


class SmallBlocks(RandomWeights):
    """Draws in blocks of 24 elements, so that small tensors are cut between blocks too."""

    BLOCK_ELEMENTS = 24


def _together(source: RandomWeights, parameter: Parameter, tensor: int) -> Tensor:
    pieces = [source.local_tensor(parameter, tensor, rank) for rank in range(tensor)]
    if parameter.split_dim is None:
        assert all(torch.equal(piece, pieces[0]) for piece in pieces)
        return pieces[0]
    return torch.cat(pieces, parameter.split_dim)


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 30), dim=st.sampled_from([0, 1, None]), tensor=st.integers(1, 4),
    padding=st.integers(0, 20), seed=st.integers(0, 3),
)  # fmt: skip
def test_shards_are_pieces_of_one_tensor(
    rows: int, columns: int, dim: int | None, tensor: int, padding: int, seed: int
) -> None:
    """At any degree, split along either dimension, with or without padded rows, across the blocks of the drawing."""
    if dim is not None and not padding:
        rows, columns = (rows * tensor, columns) if dim == 0 else (rows, columns * tensor)
    padded = rows + padding if dim == 0 and padding else 0
    units = rows if dim == 0 else columns
    if dim == 1 and columns % tensor:
        columns = units = columns * tensor
    parameter = Parameter("x", 0, "x", (rows, columns), Init(std=1.0), True, dim, units, padded_rows=padded)
    source = SmallBlocks(seed)
    assert torch.equal(_together(source, parameter, tensor), source.local_tensor(parameter, 1, 0))


def test_weights_differ_by_name_and_seed_and_have_the_spread_they_should() -> None:
    config = ModelConfig(n_layers=2, hidden_size=128, n_heads=4, vocab_size=1000, init_std=0.05)
    table = parameter_table(config)
    drawn = {p.name: RandomWeights(1).local_tensor(p, 1, 0) for p in table}
    other = {p.name: RandomWeights(2).local_tensor(p, 1, 0) for p in table}
    random = [name for name, tensor in drawn.items() if tensor.std() > 0 and tensor.ndim > 1]
    assert len(random) == 2 + 2 * 6  # embeddings; query, key, value, output, up, down of two blocks
    for index, name in enumerate(random):
        assert not torch.equal(drawn[name], other[name])
        for earlier in random[:index]:
            if drawn[earlier].shape == drawn[name].shape:
                assert not torch.equal(drawn[earlier], drawn[name]), (earlier, name)
        # GPT-2: projections into the residual are smaller by sqrt(2 n_layers).
        std = 0.05 / (4**0.5 if name.endswith(("output.weight", "down.weight")) else 1)
        samples = drawn[name].numel()
        assert abs(float(drawn[name].std()) / std - 1) < 5 / (2 * samples) ** 0.5
        assert abs(float(drawn[name].mean())) < 5 * std / samples**0.5
    for name in set(drawn) - set(random):
        assert torch.equal(drawn[name], torch.full_like(drawn[name], float("norm.weight" in name))), name


def test_marks_that_deepspeed_reads() -> None:
    """Split parameters count in the norm on every tensor rank, replicated ones once."""
    config = ModelConfig(n_layers=1, hidden_size=16, n_heads=4, n_kv_heads=2, vocab_size=300)
    table = parameter_table(config)
    builder = ParameterBuilder(table, TensorGroup(size=4, rank=1), RandomWeights(0))
    marked = {p.name for p in table if builder.build(p.name).tensor_model_parallel}  # type: ignore[attr-defined]
    block = "blocks.0."
    assert marked == {
        "embedding.weight",
        *(f"{block}{name}" for name in ("attention.query.weight", "attention.query.bias", "attention.output.weight")),
        *(f"{block}mlp.{name}" for name in ("up.weight", "up.bias", "down.weight")),
    }  # 2 key/value heads on 4 ranks are replicated


class _WrongShape:
    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        return torch.zeros(3, 3)


def test_a_source_of_another_shape_is_refused_by_name() -> None:
    config = ModelConfig(n_layers=1, hidden_size=16, n_heads=4, vocab_size=300)
    builder = ParameterBuilder(parameter_table(config), TensorGroup(size=2, rank=0), _WrongShape())
    with pytest.raises(CheckpointError, match=r"position.weight.*\[3, 3\].*\[1024, 16\]"):
        builder.build("position.weight")
