"""Topology: ranks and coordinates as DeepSpeed numbers them, tensor groups inside nodes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mdsp.errors import ConfigError
from mdsp.topology import Coordinates, Topology
from tests.harness import run_ranks

DEGREES = st.integers(1, 6)


@given(DEGREES, DEGREES, DEGREES)
def test_order_is_that_of_deepspeed(tensor: int, pipeline: int, data: int) -> None:
    topology = Topology(tensor, pipeline, data)
    grid = topology.deepspeed()
    assert topology.world_size == grid.world_size() == tensor * pipeline * data
    for rank in range(topology.world_size):
        at, theirs = topology.coordinates(rank), grid.get_coord(rank)
        assert (at.stage, at.data, at.tensor) == (theirs.pipe, theirs.data, theirs.model)
        assert topology.rank(at) == rank == grid.get_rank(pipe=at.stage, data=at.data, model=at.tensor)
    assert list(topology.tensor_groups()) == [
        [grid.get_rank(pipe=stage, data=replica, model=place) for place in range(tensor)]
        for stage in range(pipeline)
        for replica in range(data)
    ]


@given(DEGREES, DEGREES, DEGREES)
def test_tensor_groups_are_a_partition_of_neighbours(tensor: int, pipeline: int, data: int) -> None:
    groups = list(Topology(tensor, pipeline, data).tensor_groups())
    assert [rank for ranks in groups for rank in ranks] == list(range(tensor * pipeline * data))
    assert {len(ranks) for ranks in groups} == {tensor}


@given(DEGREES, DEGREES, DEGREES, st.integers(1, 16), st.booleans())
def test_nodes(tensor: int, pipeline: int, data: int, ranks_per_node: int, strict: bool) -> None:
    """A warning, or the one error, exactly when some group has ranks on two nodes; it proposes degrees that fit."""
    topology = Topology(tensor, pipeline, data)
    grid = topology.deepspeed()
    spans = False
    for stage in range(pipeline):
        for replica in range(data):
            ranks = [grid.get_rank(pipe=stage, data=replica, model=place) for place in range(tensor)]
            spans |= len({rank // ranks_per_node for rank in ranks}) > 1
    if not spans:
        assert topology.check_nodes(ranks_per_node, strict) is None
        return
    if strict:
        with pytest.raises(ConfigError) as caught:
            topology.check_nodes(ranks_per_node, strict)
        message: str | None = str(caught.value)
    else:
        message = topology.check_nodes(ranks_per_node, strict)
    assert message is not None
    assert f"mdsp.parallel.tensor = {tensor}" in message
    proposed = message.split("stay inside: ")[1].split(";")[0].split(", ")
    for degree in map(int, proposed):
        assert Topology(degree, pipeline, data).check_nodes(ranks_per_node, True) is None


def test_message_names_the_group_and_its_nodes() -> None:
    """Tensor degree 3 on nodes of 4: ranks 3, 4, 5 are the first group on two nodes."""
    assert Topology(2, 2, 2).check_nodes(4, strict=True) is None
    message = Topology(3, 1, 4).check_nodes(4, strict=False)
    assert message is not None
    assert "2 groups span nodes (group 1 is on nodes 0, 1)" in message
    assert message.endswith("stay inside: 1, 2, 4")


def _group(topology: Topology) -> tuple[int, int, list[int]]:
    group = topology.tensor_group(dist.get_rank(), sequence_parallel=True)
    assert group.splits_sequence == (topology.tensor > 1)
    members = [dist.get_rank()] if group.process_group is None else dist.get_process_group_ranks(group.process_group)
    return group.size, group.rank, members


@pytest.mark.parametrize("topology", [Topology(2, 1, 2), Topology(1, 2, 2)])
def test_process_groups(topology: Topology) -> None:
    found = run_ranks(_group, topology.world_size, topology)
    for rank, (size, place, members) in enumerate(found):
        assert size == topology.tensor
        assert members[place] == rank
        assert members == [topology.rank(Coordinates(*_fixed(topology, rank), tensor)) for tensor in range(size)]


def _fixed(topology: Topology, rank: int) -> tuple[int, int]:
    at = topology.coordinates(rank)
    return at.stage, at.data
