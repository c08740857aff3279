"""RunConfig: what may stand in the JSON file. Types and single-key rules live here, combinations in `rules.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mdsp.model.config import Frozen


class ParallelConfig(Frozen):
    """How the model is spread. Data-parallel degree = devices / (tensor x pipeline)."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel degree: ranks that share every matrix of a block (Shoeybi et al. 2019)."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline-parallel degree: number of stages."""
    sequence_parallel: bool = False
    """Split norms, dropout and the residual along the sequence over the tensor ranks (Korthikanti et al. 2022)."""
    blocks_per_stage: list[int] | None = None
    """Transformer blocks of each stage; None balances the stages by computed cost."""
    strict_topology: bool = False
    """Refuse, instead of warn, when a tensor-parallel group would span nodes."""


class DataConfig(Frozen):
    """Tokenised text, as written by `mdsp prepare`."""

    train: str | list[str] | None = None
    """Path prefix (without .bin/.idx) of the training tokens; a list is read one after the other as one corpus."""
    valid: str | list[str] | None = None
    """Path prefix of held-out tokens for evaluation."""
    seq_length: int = Field(default=1024, gt=0)
    """Tokens per sample."""
    tokenizer: str | None = None
    """Directory of the tokenizer files; copied into checkpoints and exports."""
    mask_separators: bool = False
    """Leave predictions that cross a document boundary out of the loss."""


class ScheduleConfig(Frozen):
    """Learning rate over time, as a factor on `optimizer.params.lr`."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After a linear warm-up: constant; linear or cosine decay; or warm-up, stable, decay (WSD)."""
    unit: Literal["steps", "tokens"] = "steps"
    """What `warmup`, `total` and `decay` count."""
    warmup: int = Field(default=0, ge=0)
    """Length of the linear warm-up from 0."""
    total: int | None = Field(default=None, gt=0)
    """Where the decay ends; None means the end of training."""
    decay: int | None = Field(default=None, gt=0)
    """wsd: length of the final decay; None means a tenth of `total`."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""


class LossGuardConfig(Frozen):
    """What happens to a step whose loss or gradient is not to be trusted.

    A NaN or infinite loss or gradient never reaches the weights, whatever stands here.
    """

    action: Literal["skip", "rollback"] = "skip"
    """skip: leave the step's update out. rollback: return to the last checkpoint and leave the step's samples out."""
    spike_deviations: float | None = Field(default=None, gt=0)
    """A loss this many standard deviations above the mean of the last `window` ones is bad; None: no loss is."""
    window: int = Field(default=64, ge=8)
    """Accepted losses that a spike is measured by; nothing is judged before half of them are there."""


class WatchdogConfig(Frozen):
    """When a step that does not end is taken for a hang, reported, and the job ended."""

    factor: float = Field(default=10.0, ge=0)
    """A step may take this many times the median step; 0 switches the watchdog off."""
    minimum: float = Field(default=60.0, gt=0)
    """But at least this many seconds."""
    first_step: float = Field(default=600.0, gt=0)
    """Seconds for the first step, of which nothing is known, and for what lies between steps: saving, evaluation."""


class TrainConfig(Frozen):
    """The loop."""

    steps: int = Field(default=100, gt=0)
    """Optimizer steps, counted from the start of training and not from a resume."""
    seed: int = Field(default=1234, ge=0)
    """Seed of initial weights, sample order and dropout."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: none, the attention core only, or whole blocks."""
    recompute_interval: int = Field(default=1, gt=0)
    """With recompute "full": blocks that share one checkpoint; only the input of every n-th block is kept."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations on `data.valid`; 0 never."""
    eval_batches: int = Field(default=8, gt=0)
    """Global batches per evaluation."""
    log_interval: int = Field(default=1, gt=0)
    """Steps between log lines."""
    max_bad_steps: int = Field(default=10, gt=0)
    """Consecutive steps skipped for overflow, NaN or infinite loss or gradient after which training stops."""
    loss_guard: LossGuardConfig = LossGuardConfig()
    """Bad steps."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Hangs."""
    communication_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a collective that a peer never joins ends the job."""
    allow_unproven_deepspeed: bool = False
    """Run on a DeepSpeed version other than those that mdsp's numbers were proven on."""


class CheckpointConfig(Frozen):
    """What is written, where, and how a run continues."""

    dir: str | None = None
    """Directory of the run's checkpoints; None writes none."""
    interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 only at the end."""
    minutes: float = Field(default=0.0, ge=0)
    """Minutes between checkpoints, besides `interval`; 0: time does not matter."""
    keep_last: int = Field(default=0, ge=0)
    """How many of the newest checkpoints stay when a new one is complete; 0: all."""
    keep_every: int = Field(default=0, ge=0)
    """With keep_last: checkpoints at multiples of this many steps stay too; 0: none for this reason."""
    background: bool = False
    """Copy the state to host memory and write it while training goes on; needs that memory once more."""
    resume: str = "none"
    """none: a fresh start. auto: the newest complete checkpoint in `dir`, or a fresh start when there is none.
    Anything else: the checkpoint at that path, and an error when it is not there."""


class MonitorConfig(Frozen):
    """Measurements."""

    dir: str = "runs"
    """Directory for logs, metrics and timelines."""
    timeline_interval: int = Field(default=10, ge=0)
    """Steps between timelines of every instruction; 0 never."""


class HfModel(Frozen):
    """`mdsp.model` when the model comes from a Hugging Face directory: all else is read from its `config.json`."""

    from_hf: str
    """Hugging Face directory (config.json and safetensors or .bin files) that gives the model and its weights."""
    embedding_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces the directory's value."""
    hidden_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces the directory's value."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces the directory's value."""
    init_std: float | None = Field(default=None, gt=0)
    """Replaces the directory's value."""


class MdspConfig(Frozen):
    """The "mdsp" section."""

    model: dict[str, Any]
    """Either {"family": ..., and `ModelConfig` fields} or {"from_hf": directory}."""
    parallel: ParallelConfig = ParallelConfig()
    """Degrees."""
    data: DataConfig = DataConfig()
    """Corpus."""
    train: TrainConfig = TrainConfig()
    """Loop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    monitor: MonitorConfig = MonitorConfig()
    """Measurements."""
