"""RunFile: the whole JSON file, with DeepSpeed's own keys typed. The keys that mdsp refuses are in `refused_keys.py`.

Written after the configuration documentation and `deepspeed/runtime/config.py` of DeepSpeed 0.19.8. Nothing is imported
from DeepSpeed: that takes seconds and needs torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mdsp.config.schema import MdspConfig
from mdsp.model.config import Frozen

DataType = Literal["fp32", "bf16", "fp16"]
OnOff = bool | None
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Frozen):
    """The optimizer."""

    type: str
    """"AdamW", "Adam" or "SGD"."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""


class AdamParams(Frozen):
    """`optimizer.params` of Adam and AdamW."""

    lr: float = Field(gt=0)
    """Peak learning rate; `mdsp.train.schedule` scales it over time."""
    betas: list[Decay] | None = Field(default=None, min_length=2, max_length=2)
    """Decay of the first and second moment; torch's default is 0.9 and 0.999."""
    eps: float | None = Field(default=None, gt=0)
    """Added to the root of the second moment; torch's default is 1e-8."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of matrices and embeddings; biases and norms have none."""
    torch_adam: OnOff = None
    """torch's fused implementation. true is filled in, and needed: DeepSpeed's own has to be compiled first."""
    adam_w_mode: OnOff = None
    """Decoupled weight decay (AdamW). As in DeepSpeed the default is true, for type "Adam" too."""
    amsgrad: OnOff = None
    """The AMSGrad variant."""


class SgdParams(Frozen):
    """`optimizer.params` of SGD."""

    lr: float = Field(gt=0)
    """Peak learning rate; `mdsp.train.schedule` scales it over time."""
    momentum: float | None = Field(default=None, ge=0)
    """Momentum."""
    dampening: float | None = Field(default=None, ge=0)
    """Dampening of the momentum."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of matrices and embeddings; biases and norms have none."""
    nesterov: OnOff = None
    """Nesterov momentum."""


class SchedulerSection(Frozen):
    """DeepSpeed's own learning-rate scheduler, instead of `mdsp.train.schedule`."""

    type: Literal["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    """Its kind."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""


class ZeroSection(Frozen):
    """Sharding of optimizer state over the data-parallel ranks."""

    stage: int = Field(default=1, ge=0, le=3)
    """1 (the default here) shards the optimizer state, 0 does not; 2 and 3 do not work in a pipeline."""
    contiguous_gradients: OnOff = None
    """Copy gradients to one buffer as they are made."""
    reduce_scatter: OnOff = None
    """Reduce-scatter instead of all-reduce."""
    reduce_bucket_size: float | None = Field(default=None, gt=0)
    """Elements reduced at a time."""
    use_multi_rank_bucket_allreduce: OnOff = None
    """Reduce buckets of several ranks together."""
    allgather_partitions: OnOff = None
    """All-gather, instead of broadcasts, for updated parameters."""
    allgather_bucket_size: float | None = Field(default=None, gt=0)
    """Elements gathered at a time."""
    overlap_comm: OnOff = None
    """Overlap the reduction with the backward pass."""
    ignore_unused_parameters: OnOff = None
    """Accept parameters without a gradient."""


class Bf16Section(Frozen):
    """bfloat16 compute with fp32 master weights."""

    enabled: bool = False
    """Turns it on."""
    immediate_grad_update: OnOff = None
    """Accumulate each gradient in fp32 as soon as it is made."""
    check_grad_overflow: OnOff = None
    """Skip steps whose gradients are not finite."""


class Fp16Section(Frozen):
    """float16 compute with fp32 master weights and loss scaling. GPUs only."""

    enabled: bool = False
    """Turns it on."""
    auto_cast: OnOff = None
    """Cast inputs to fp16."""
    loss_scale: float | None = Field(default=None, ge=0)
    """A fixed loss scale; 0 is dynamic."""
    initial_scale_power: int | None = Field(default=None, ge=0)
    """Dynamic: starts at 2 to this power."""
    loss_scale_window: int | None = Field(default=None, gt=0)
    """Dynamic: good steps before the scale is doubled."""
    hysteresis: int | None = Field(default=None, gt=0)
    """Dynamic: overflows before the scale is halved."""
    consecutive_hysteresis: OnOff = None
    """Dynamic: a good step refills the hysteresis."""
    min_loss_scale: int | None = Field(default=None, gt=0)
    """Dynamic: smallest scale."""


class DataTypesSection(Frozen):
    """Number formats beside the compute format."""

    grad_accum_dtype: DataType | None = None
    """Format of accumulated gradients; fp32 is filled in, and needed, for bf16."""


class PipelineSection(Frozen):
    """The pipeline engine."""

    pipe_partitioned: OnOff = None
    """Tensor-parallel ranks each send a part of the activations between stages (DeepSpeed's default)."""
    grad_partitioned: OnOff = None
    """The same for gradients."""
    use_reentrant: OnOff = None
    """Kind of activation checkpointing; false is filled in, and needed."""
    seed_layers: OnOff = None
    """Reseed the random numbers in every layer; must stay off."""
    activation_checkpoint_interval: int | None = Field(default=None, ge=0)
    """Must stay 0: `mdsp.train.recompute` says what is recomputed."""


class WandbSection(Frozen):
    """Weights & Biases."""

    enabled: bool = False
    """Turns it on."""
    project: str | None = None
    """Project."""
    group: str | None = None
    """Group of runs."""
    team: str | None = None
    """Team (entity)."""


class FileMonitorSection(Frozen):
    """TensorBoard or CSV files."""

    enabled: bool = False
    """Turns it on."""
    output_path: str | None = None
    """Directory."""
    job_name: str | None = None
    """Directory inside it."""


class FlopsProfilerSection(Frozen):
    """DeepSpeed's FLOPs profiler; mdsp reports FLOP/s without it."""

    enabled: bool = False
    """Turns it on; needs `mdsp.parallel.pipeline` 1."""
    recompute_fwd_factor: float | None = None
    """Share of the forward pass that is recomputed."""
    profile_step: int | None = Field(default=None, gt=0)
    """The step to profile."""
    module_depth: int | None = None
    """Depth of modules to print; -1 for all."""
    top_modules: int | None = Field(default=None, gt=0)
    """Modules to print per depth."""
    detailed: OnOff = None
    """Print the whole model."""
    output_file: str | None = None
    """Where to write it."""


class CheckpointSection(Frozen):
    """How DeepSpeed writes checkpoints; what and when is said in `mdsp.checkpoint`."""

    tag_validation: Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL"] | None = None
    """What happens when ranks disagree about a checkpoint's name."""
    parallel_write: dict[str, Any] | None = None
    """Which ranks write."""


class RunFile(Frozen):
    """The whole JSON file."""

    train_batch_size: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Samples per optimizer step: micro-batch x accumulation steps x data-parallel degree."""
    train_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    """Samples that go through the pipeline together."""
    gradient_accumulation_steps: int | None = Field(default=None, gt=0)
    """Micro-batches per optimizer step; the more, the smaller the pipeline bubble."""
    optimizer: OptimizerSection
    """The optimizer."""
    scheduler: SchedulerSection | None = None
    """DeepSpeed's scheduler, instead of `mdsp.train.schedule`."""
    zero_optimization: ZeroSection = ZeroSection()
    """ZeRO."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest norm of all gradients together; 0 never clips."""
    bf16: Bf16Section = Bf16Section()
    """bfloat16."""
    fp16: Fp16Section = Fp16Section()
    """float16."""
    data_types: DataTypesSection = DataTypesSection()
    """Number formats."""
    communication_data_type: DataType | None = None
    """Format in which gradients are reduced; None is that of the gradients."""
    pipeline: PipelineSection = PipelineSection()
    """Pipeline engine."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases."""
    tensorboard: FileMonitorSection = FileMonitorSection()
    """TensorBoard."""
    csv_monitor: FileMonitorSection = FileMonitorSection()
    """CSV files."""
    comet: dict[str, Any] | None = None
    """Comet."""
    steps_per_print: int | None = Field(default=None, gt=0)
    """Steps between DeepSpeed's own log lines; None is practically never, because mdsp logs."""
    wall_clock_breakdown: bool = False
    """DeepSpeed's timers; need `mdsp.parallel.pipeline` 1."""
    memory_breakdown: bool = False
    """Log memory at DeepSpeed's milestones."""
    flops_profiler: FlopsProfilerSection = FlopsProfilerSection()
    """FLOPs profiler."""
    comms_logger: dict[str, Any] | None = None
    """Log every collective."""
    timers: dict[str, Any] | None = None
    """Throughput timer."""
    checkpoint: CheckpointSection | None = None
    """Checkpoint writing."""
    zero_allow_untested_optimizer: OnOff = None
    """Accept an optimizer that DeepSpeed has not tested with ZeRO; true is filled in, and SGD needs it."""
    disable_allgather: OnOff = None
    """Broadcasts instead of all-gathers."""
    disable_python_gc: OnOff = None
    """Turn Python's garbage collector off during steps."""
    dump_state: OnOff = None
    """Print DeepSpeed's state after initialisation."""
    log_level: str | None = None
    """DeepSpeed's log level."""
    mdsp: MdspConfig
    """Everything that is mdsp's own."""
