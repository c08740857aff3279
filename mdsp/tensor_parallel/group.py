"""TensorGroup: the tensor-parallel group of one rank, and a record of what was communicated in it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Traffic:
    """Collectives that one rank took part in since the last `clear`. Seconds are host time, exact on CPU only."""

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @contextmanager
    def record(self, kind: str, elements: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.calls[kind] += 1
        self.elements[kind] += elements

    def clear(self) -> None:
        self.calls.clear()
        self.elements.clear()
        self.seconds = 0.0


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share every matrix of a block. `size` 1 needs no process group and no torch.distributed."""

    size: int = 1
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def splits_sequence(self) -> bool:
        """Whether the residual stream on this rank is a slice of the sequence."""
        return self.sequence_parallel and self.size > 1
