"""Topology: degrees, coordinates and process groups. The only file that knows in which order ranks are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mdsp.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    from mdsp.tensor_parallel.group import TensorGroup


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands on the three axes."""

    stage: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """A (pipeline, data, tensor) grid of ranks, tensor innermost.

    Tensor groups exchange the most and therefore hold neighbouring ranks, which share a node; stages exchange the least
    and lie furthest apart. The order is that of DeepSpeed's `PipeModelDataParallelTopology`.
    """

    tensor: int
    pipeline: int
    data: int

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        stage, data = divmod(rest, self.data)
        return Coordinates(stage, data, tensor)

    def rank(self, at: Coordinates) -> int:
        return (at.stage * self.data + at.data) * self.tensor + at.tensor

    def tensor_groups(self) -> Iterator[list[int]]:
        """Ranks of every tensor-parallel group."""
        for first in range(0, self.world_size, self.tensor):
            yield list(range(first, first + self.tensor))

    def nodes_of_tensor_groups(self, ranks_per_node: int) -> list[tuple[int, list[int]]]:
        """Tensor-parallel groups that span nodes: (index of the group, the nodes it touches)."""
        spanning = []
        for index, ranks in enumerate(self.tensor_groups()):
            nodes = sorted({rank // ranks_per_node for rank in ranks})
            if len(nodes) > 1:
                spanning.append((index, nodes))
        return spanning

    def check_nodes(self, ranks_per_node: int, strict: bool) -> str | None:
        """A warning when tensor-parallel groups span nodes; a ConfigError when `strict`; None when all is well."""
        spanning = self.nodes_of_tensor_groups(ranks_per_node)
        if not spanning:
            return None
        index, nodes = spanning[0]
        fitting = [d for d in range(1, ranks_per_node + 1) if ranks_per_node % d == 0]
        message = (
            f"mdsp.parallel.tensor = {self.tensor}: {len(spanning)} groups span nodes (group {index} is "
            f"on nodes {', '.join(map(str, nodes))}), so every block's all-reduces cross the network. With "
            f"{ranks_per_node} devices per node, tensor degrees that stay inside: {', '.join(map(str, fitting))}"
        )
        if strict:
            raise ConfigError(message + "; or set mdsp.parallel.strict_topology to false")
        return message

    def deepspeed(self) -> PipeModelDataParallelTopology:
        """The same grid as DeepSpeed's object, which names the axes pipe, data, model."""
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        return PipeModelDataParallelTopology(num_pp=self.pipeline, num_mp=self.tensor, num_dp=self.data)

    def tensor_group(self, rank: int, sequence_parallel: bool) -> TensorGroup:
        """The tensor-parallel group of `rank`. Collective: every rank of the job must call it."""
        import torch.distributed as dist

        from mdsp.tensor_parallel.group import TensorGroup

        mine: TensorGroup = TensorGroup(sequence_parallel=sequence_parallel)
        if self.tensor == 1:
            return mine
        for ranks in self.tensor_groups():
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = TensorGroup(self.tensor, rank - ranks[0], group, sequence_parallel)
        return mine
