"""What a rule sees: the typed file, the model, the world, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mdsp.config.deepspeed_schema import RunFile
from mdsp.config.problems import Problem
from mdsp.config.schema import MdspConfig
from mdsp.model.config import ModelConfig

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class View:
    """A configuration whose keys are all known and typed, before its combinations are checked."""

    file: RunFile
    """The file with overrides applied; defaults of the schema where a key is absent."""
    model: ModelConfig | None
    """The model; None when it could not be resolved, which is reported by itself."""
    world_size: int
    """Number of ranks."""
    deepspeed_version: str | None
    """Version of the installed DeepSpeed; None: not installed."""

    @property
    def mdsp(self) -> MdspConfig:
        """Our section."""
        return self.file.mdsp

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return self.mdsp.parallel.tensor

    @property
    def pipeline(self) -> int:
        """Number of stages."""
        return self.mdsp.parallel.pipeline

    @property
    def data(self) -> int | None:
        """Data-parallel degree; None when the other degrees do not divide the world."""
        product = self.tensor * self.pipeline
        return self.world_size // product if self.world_size % product == 0 else None

    @property
    def precision(self) -> Precision:
        """Format of the compute."""
        return "bf16" if self.file.bf16.enabled else "fp16" if self.file.fp16.enabled else "fp32"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table of what goes together."""

    key: str
    """The key that is named when the rule is broken."""
    statement: str
    """What must hold; printed in the documentation."""
    check: Callable[[View], Problem | None]
    """The problem, or None."""
