"""The memory model: bytes that each rank of each stage holds at its peak, part by part.

weights      2 B per parameter held (fp32: 4)
gradients    4 B (fp32 accumulation), 2 B, or both
optimizer    fp32 master, two Adam moments: 12 B (fp32: 8), divided by data parallelism from ZeRO-1 on
activations  Korthikanti et al. 2022, eq. 1-6, per block, micro-batch in flight: min(P - stage, M) of them (1F1B)
logits       16-bit and fp32 copies on the last stage, one micro-batch
buffers      reduction buckets and the gathered pieces of one block
overhead     what an allocator keeps beyond tensors: a constant, named, see `ALLOCATOR_BYTES` and `PROCESS_BYTES`
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mdsp.model.config import ModelConfig
from mdsp.plan.layout import Layout, Software, Workload, model_sizes

ALLOCATOR_BYTES = 2e9
"""Peak of the caching allocator beyond the tensors: fragmentation, workspaces of the matrix library."""
PROCESS_BYTES = 11e9
"""What nvidia-smi shows beyond the allocator's peak: device context, communicators, the allocator's cache."""
LOGIT_BYTES = 10.0
"""Per logit at the peak: 16-bit logits, fp32 copy, fp32 gradient or exponentials."""
BUCKET_BYTES = 1e9
"""Reduction buckets of programs that fill them as they go."""
BUCKET_ELEMENTS = 1e9
"""DeepSpeed's ZeRO optimizer (fp16, fp32) allocates two buckets of `reduce_bucket_size` 5e8, whatever the model."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at its peak, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    overhead: float

    @property
    def total(self) -> float:
        return self.tensors + self.overhead

    @property
    def tensors(self) -> float:
        """Without the allocator's overhead: what the tensors themselves take."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def value_bytes(work: Workload) -> float:
    """Bytes of a weight or an activation (fp8 runs keep both in 16 bit)."""
    return 4.0 if work.precision == "fp32" else 2.0


def state_bytes(work: Workload, software: Software) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients, optimizer (master and moments) before any sharding.

    In fp32 DeepSpeed's ZeRO optimizer keeps a second copy of the rank's part of the weights as its master.
    """
    if work.precision == "fp32":
        return 4.0, 4.0, 12.0 if software.deepspeed else 8.0
    return 2.0, software.gradient_bytes, 12.0


def block_activation_bytes(work: Workload, layout: Layout, software: Software, recompute: str | None = None) -> float:
    """Bytes that one block keeps for its backward pass, per micro-batch, on one rank.

    Korthikanti et al. 2022 with the true widths: s b h (10 + 24 / t + 5 a s / (h t)) for their GPT (fp16, dropout,
    ffn = 4 h); grouped heads, gated MLPs and absent dropout change the terms; sequence parallelism divides the 10 by t.
    """
    config, tp = work.model, layout.tensor
    recompute = layout.recompute if recompute is None else recompute
    size = value_bytes(work)
    rows = layout.micro_batch * work.seq_length / layout.context
    sharded = tp if layout.sequence_parallel else 1
    if recompute == "full":
        return size * rows * config.hidden_size / sharded
    masks = 2.0 * (config.hidden_dropout > 0)
    # fp8 keeps the inputs of the linear layers as it multiplied them; norms and the attention core stay in 16 bit.
    linear = 1.0 if work.precision == "fp8" and software.fp8_activations else size
    norms = 1 if config.shared_norm else 2
    wide = 4.0 * norms if software.wide_norms and config.norm == "rmsnorm" else 0.0
    whole = (norms * linear + 2 * size + masks + wide) * config.hidden_size / sharded
    query, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    split_kv = kv / tp if config.n_kv_heads % tp == 0 else kv
    # queries, keys, values, and the core's output, which is the input of the output projection
    attention = size * (query / tp + 2 * split_kv) + linear * query / tp
    between = (3 if software.eager else 2) if config.gated_mlp else 1
    mlp = (size * between + linear) * config.ffn_size / tp
    kept = rows * (whole + attention + mlp)
    if software.flash:
        kept += rows * 4.0 * config.n_heads / tp  # log-sum-exp
    elif recompute != "selective":
        span = min(work.seq_length, config.sliding_window or work.seq_length)
        masked = 1.0 if config.attention_dropout > 0 else 0.0
        kept += rows * span * config.n_heads / tp * (size * (2 if masked else 1) + masked)
    if recompute in ("half", "matmul"):
        return kept / 2 + size * rows * config.hidden_size / sharded / 2
    return kept


def working_bytes(work: Workload, layout: Layout) -> float:
    """Bytes that the backward pass of one block needs for gradients of activations, and the pipeline for its messages.

    The gradients on both sides of the MLP's activation, and of the residual; what is received and what is sent.
    """
    config = work.model
    rows = layout.micro_batch * work.seq_length / layout.context
    between = (2 if config.gated_mlp else 1) * config.ffn_size / layout.tensor
    return value_bytes(work) * rows * (between + 5 * config.hidden_size)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at its peak (Narayanan et al. 2021; Qi et al. 2023)."""
    pp = layout.pipeline
    if pp == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(micro_batches)
    if layout.schedule == "zb2":
        return float(min(2 * (pp - stage), micro_batches))
    if layout.schedule == "zbv":
        return float(min(pp, micro_batches))
    if layout.virtual > 1:
        # 2 (p - stage - 1) + (v - 1) p + 1 chunks of 1 / v stage each
        return min((2 * (pp - stage - 1) + (layout.virtual - 1) * pp + 1) / layout.virtual, float(micro_batches))
    return float(min(pp - stage, micro_batches))


def rank_memory(
    work: Workload, layout: Layout, software: Software, stage: int, overhead: float = ALLOCATOR_BYTES
) -> RankMemory:
    """Bytes of one rank of a stage. `overhead` is what is added beyond the tensors."""
    config = work.model
    sizes = model_sizes(config, layout.tensor)
    stages = layout.stages(config.n_layers)
    held = sizes.stage(stage, stages)
    micro_batches = layout.micro_batches(work.global_batch)
    weight, gradient, optimizer = state_bytes(work, software)
    shards = layout.data * layout.context
    size = value_bytes(work)
    rows = layout.micro_batch * work.seq_length / layout.context

    block = block_activation_bytes(work, layout, software)
    flying = in_flight(layout, stage, micro_batches)
    activations = flying * stages[stage] * block + working_bytes(work, layout)
    if layout.recompute == "full":
        activations += block_activation_bytes(work, layout, software, "none")
    if stage == 0:
        embedded = rows * config.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
        activations += flying * embedded * (1.0 * (config.embedding_dropout > 0))
    logits = 0.0
    if stage == layout.pipeline - 1:
        logits = rows * _head_columns(config, layout.tensor) * (12.0 if work.precision == "fp32" else LOGIT_BYTES)
        logits += 2 * size * rows * config.hidden_size
    buffers = 0.0
    if layout.zero == 3:
        # Two blocks at a time; a pipeline keeps what it gathered, and unreduced gradients, for all its micro-batches.
        buffers = held * (size + gradient) if layout.pipeline > 1 else 2 * sizes.block * size
    elif software.deepspeed and work.precision in ("fp16", "fp32") and layout.zero:
        buffers = BUCKET_ELEMENTS * size
    elif shards > 1:
        buffers = min(BUCKET_BYTES, held * size)
    return RankMemory(
        weights=held * weight / (shards if layout.zero == 3 else 1),
        gradients=held * gradient / (shards if layout.zero >= 2 else 1),
        optimizer=held * optimizer / (shards if layout.zero >= 1 else 1),
        activations=activations,
        logits=logits,
        buffers=buffers,
        overhead=overhead,
    )


def _head_columns(config: ModelConfig, tensor: int) -> int:
    return -(-config.padded_vocab_size // tensor)


def peak_memory(
    work: Workload, layout: Layout, software: Software, overhead: float = ALLOCATOR_BYTES
) -> tuple[int, RankMemory]:
    """The stage that needs most, and what one of its ranks holds."""
    # Parameters and in-flight micro-batches fall with the stage: only the ends and the fullest stages can be the peak.
    stages = layout.stages(work.model.n_layers)
    fullest = stages.index(max(stages))
    candidates = sorted({0, min(1, len(stages) - 1), fullest, len(stages) - 1})
    found = [(index, rank_memory(work, layout, software, index, overhead)) for index in candidates]
    return max(found, key=lambda pair: pair[1].total)
