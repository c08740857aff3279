"""TensorGroup: the tensor-parallel group of one rank, and a record of what was communicated in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch.distributed as dist


class SpanRecorder(Protocol):
    """What can be told when communication begins and ends (see `mdsp.metrics.timeline`)."""

    def start(self, kind: Literal["tensor_parallel"]) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Traffic:
    """Collectives that one rank took part in since the last `clear`, and who is told about them."""

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    recorder: SpanRecorder | None = None

    def count(self, kind: str, elements: int) -> None:
        self.calls[kind] += 1
        self.elements[kind] += elements

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a call in which this rank waits for its group."""
        if self.recorder is None:
            yield
            return
        self.recorder.start("tensor_parallel")
        yield
        self.recorder.stop()

    def clear(self) -> None:
        self.calls.clear()
        self.elements.clear()


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
