"""RunConfig: one checked run. Every number in it is resolved; nothing is left to derive or to default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mdsp.config.schema import MdspConfig
from mdsp.config.view import Precision
from mdsp.metrics.theory import theoretical_bubble
from mdsp.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model and the batch are spread."""

    tensor: int
    """Tensor-parallel degree."""
    pipeline: int
    """Number of stages."""
    data: int
    """Data-parallel degree."""
    micro_batch: int
    """Samples that go through the pipeline together."""
    gradient_accumulation_steps: int
    """Micro-batches per optimizer step and data-parallel rank."""
    global_batch: int
    """Samples per optimizer step over all ranks."""
    blocks_per_stage: tuple[int, ...]
    """Transformer blocks of each stage."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def bubble(self) -> float:
        """Idle share of a 1F1B step with equal stages: (P - 1) / (M + P - 1) (Narayanan et al. 2021)."""
        return theoretical_bubble(self.pipeline, self.gradient_accumulation_steps)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A configuration in which every rule holds."""

    deepspeed: dict[str, Any]
    """The top-level keys for `deepspeed.initialize`: batch sizes resolved, safe defaults filled in, no "mdsp"."""
    mdsp: MdspConfig
    """Our section."""
    model: ModelConfig
    """The model."""
    layout: Layout
    """Degrees, batch and stages."""
    precision: Precision
    """Format of the compute: fp32, bf16 or fp16."""
