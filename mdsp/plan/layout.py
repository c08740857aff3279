"""What is planned: a workload (model, batch, precision), a layout of it on devices, and the software that runs it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from mdsp.model.config import ModelConfig
from mdsp.model.table import (
    FIRST_BLOCK_LAYER,
    POSITION_LAYER,
    TOKEN_EMBEDDING_LAYER,
    final_norm_layer,
    head_layer,
    parameter_table,
)

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full", "half", "matmul"]
"""none, attention core, whole blocks; half: every second block; matmul: every second matrix product (torchtitan)."""
Schedule = Literal["1f1b", "gpipe", "zb1", "zb2", "zbv"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What has to be computed in one step."""

    model: ModelConfig
    seq_length: int
    global_batch: int
    """Sequences per optimizer step."""
    precision: Precision = "bf16"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a workload is spread. mdsp runs context 1, virtual 1, ZeRO 0 or 1, 1F1B; published runs also the others."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 1
    context: int = 1
    virtual: int = 1
    """Chunks of consecutive layers per stage (interleaved 1F1B, Narayanan et al. 2021)."""
    schedule: Schedule = "1f1b"
    blocks_per_stage: tuple[int, ...] = ()
    """Transformer blocks of each stage; empty: `even_stages`."""

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches per pipeline and step (gradient accumulation steps)."""
        return max(1, global_batch // (self.data * self.micro_batch))

    def stages(self, n_layers: int) -> tuple[int, ...]:
        return self.blocks_per_stage or even_stages(n_layers, self.pipeline, self.virtual)

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


@functools.lru_cache(maxsize=1024)
def even_stages(n_layers: int, pipeline: int, virtual: int = 1) -> tuple[int, ...]:
    """Blocks per stage where nothing else is said.

    Equal where they divide; where blocks + 2 divide (126 blocks, 8 stages), embedding and head count as one block each,
    as published recipes do; otherwise the remainder goes to the stages in the middle.
    """
    chunks = pipeline * virtual
    if n_layers % chunks and (n_layers + 2) % chunks == 0 and pipeline > 1 and (n_layers + 2) // pipeline > 1:
        each = (n_layers + 2) // pipeline
        return (each - 1, *([each] * (pipeline - 2)), each - 1)
    each, extra = divmod(n_layers, pipeline)
    first = (pipeline - extra) // 2
    return tuple(each + (first <= stage < first + extra) for stage in range(pipeline))


@dataclass(frozen=True, slots=True)
class Software:
    """What the training program does that changes time or memory."""

    name: str
    flash: bool = True
    """Attention never writes the [seq, seq] scores (Dao et al. 2022)."""
    eager: bool = False
    """Norms, activations, dropout and residual run as separate kernels, each going through memory."""
    overlap_tensor: bool = False
    """Tensor-parallel communication overlaps with the matrix products beside it."""
    overlap_data: bool = False
    """Gradient reduction overlaps with the backward pass."""
    deepspeed: bool = False
    """DeepSpeed's pipeline engine: separate gradient accumulation, partitioned activations."""
    per_parameter_gather: bool = False
    """ZeRO-3 that gathers parameter by parameter (DeepSpeed in 2021), not in large buckets."""
    gradient_bytes: float = 4.0
    """Kept per parameter for gradients in 16-bit training: 4 fp32, 2 as the weights, 6 both."""
    reduce_bytes: float = 4.0
    """Sent per parameter to sum gradients over the data-parallel ranks; 4 also where 2 are all-reduced."""
    fp8_activations: bool = False
    """fp8 linear layers keep their inputs in fp8 for the backward pass."""
    wide_norms: bool = False
    """RMSNorm as separate operations in fp32, which keep two more copies of their input."""


MDSP = Software("mdsp", eager=True, deepspeed=True, gradient_bytes=6.0, wide_norms=True)
"""Its bf16 optimizer keeps gradients in both formats."""


def mdsp_software(precision: Precision) -> Software:
    """What mdsp does in a precision: the fp16 optimizer accumulates where it computes."""
    return dataclasses.replace(MDSP, gradient_bytes=2.0) if precision == "fp16" else MDSP


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of a model that memory and time need, taken from the parameter table at one tensor-parallel degree.

    All counts are elements on one tensor-parallel rank, with padding and replicas, as the engine holds them.
    """

    config: ModelConfig
    tensor: int
    block: int
    """Parameters of one transformer block."""
    embedding: int
    """Token embedding, position table, embedding norm: first stage."""
    head: int
    """Final norm and vocabulary head: last stage (a tied head is a copy there)."""
    shared_head: int
    """Of `head`, the part that is the embedding itself when both are on one stage."""
    total: int
    """Parameters of the whole model: unsharded, without padding, tied ones once."""

    def stage(self, stage: int, stages: tuple[int, ...]) -> int:
        """Parameters that one rank of a stage holds."""
        first, last = stage == 0, stage == len(stages) - 1
        held = stages[stage] * self.block + first * self.embedding + last * self.head
        return held - (self.shared_head if first and last else 0)


@functools.lru_cache(maxsize=512)
def model_sizes(config: ModelConfig, tensor: int) -> ModelSizes:
    """The sizes of a model on one of `tensor` ranks."""
    table = parameter_table(config)
    embedding = table.layer_numel(TOKEN_EMBEDDING_LAYER, tensor)
    return ModelSizes(
        config=config,
        tensor=tensor,
        block=table.layer_numel(FIRST_BLOCK_LAYER, tensor),
        embedding=embedding + table.layer_numel(POSITION_LAYER, tensor),
        head=table.layer_numel(final_norm_layer(config), tensor) + table.layer_numel(head_layer(config), tensor),
        shared_head=embedding if config.tied_head else 0,
        total=table.numel,
    )
