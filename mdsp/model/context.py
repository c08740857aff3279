"""ModelContext: what every layer of one rank shares."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from mdsp.model.config import ModelConfig
from mdsp.tensor_parallel.group import TensorGroup
from mdsp.tensor_parallel.random import DropoutStreams


@dataclass
class ModelContext:
    """The model's description and this rank's place in it."""

    config: ModelConfig
    group: TensorGroup = field(default_factory=TensorGroup)
    streams: DropoutStreams = field(default_factory=DropoutStreams)
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_interval: int = 1
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, compute: Callable[..., Any], *args: Any) -> Any:
        """compute(*args), once per key: rotary tables and masks are the same in every block and micro-batch."""
        if key not in self._cache:
            if len(self._cache) > 16:  # sequence lengths of evaluation and generation come and go
                self._cache.clear()
            self._cache[key] = compute(*args)
        return self._cache[key]
