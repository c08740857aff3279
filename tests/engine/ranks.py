"""Training small models on forked ranks: cases, a plain-chunk weight source, an engine that keeps its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepspeed.utils.groups
import torch.distributed as dist
from torch import Tensor

from mdsp.config.load import RunConfig, resolve_run_config
from mdsp.engine.build import build_engine
from mdsp.engine.engine import MdspEngine
from mdsp.model.table import Parameter
from tests.engine.reference import CLIP, GLOBAL_BATCH, OPTIMIZERS, STEPS, Batch, global_batch
from tests.model.hf_models import SEQ, Tensors


@dataclass(frozen=True)
class Layout:
    """Degrees of a test; ranks are numbered tensor innermost, then data, then stage."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, data rank, tensor rank)."""
        return rank // (self.tensor * self.data), rank // self.tensor % self.data, rank % self.tensor

    def __str__(self) -> str:
        return f"TP{self.tensor}xPP{self.pipeline}xDP{self.data}"


@dataclass(frozen=True)
class Case:
    """One training run: a model, how it is spread and how it is trained."""

    model: str
    layout: Layout
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_interval: int = 1
    optimizer: str = "SGD"
    micro_batches: int = 5
    steps: int = STEPS
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further top-level keys of the JSON file."""

    def __str__(self) -> str:
        words = [self.model, str(self.layout), self.optimizer, f"{self.micro_batches} micro-batches"]
        words += ["sequence parallel"] * self.sequence_parallel
        if self.recompute != "none":
            words.append(f"recompute {self.recompute} x{self.recompute_interval}")
        return ", ".join(words)

    def run_config(self, fields: Mapping[str, Any]) -> RunConfig:
        """The configuration as it would be loaded from a file, for the model that `fields` describe."""
        document: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (self.layout.data * self.micro_batches),
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": self.optimizer, "params": dict(OPTIMIZERS[self.optimizer])},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": CLIP,
            "mdsp": {
                "model": dict(fields),
                "parallel": {
                    "tensor": self.layout.tensor,
                    "pipeline": self.layout.pipeline,
                    "sequence_parallel": self.sequence_parallel,
                },
                "data": {"seq_length": SEQ},
                "train": {"recompute": self.recompute, "recompute_interval": self.recompute_interval},
            },
            **self.settings,
        }
        return resolve_run_config(document, self.layout.world_size)


def split_dimension(name: str, fields: Mapping[str, Any], tensor: int) -> int | None:
    """Along which dimension Megatron-style tensor parallelism cuts a parameter; None: every rank has all of it."""
    module, kind = name.rsplit(".", 1)
    last = module.rsplit(".", 1)[-1]
    if tensor == 1:
        return None
    if last in ("key", "value", "key_norm") and fields.get("n_kv_heads", fields["n_heads"]) % tensor:
        return None  # too few heads: replicated
    if last in ("embedding", "head", "query", "key", "value", "gate", "up"):
        return 0
    if last in ("query_norm", "key_norm") and fields.get("qk_norm") == "full":
        return 0
    if kind == "weight" and last in ("output", "down"):
        return 1
    return None


def vocabulary_rows(fields: Mapping[str, Any], tensor: int) -> int:
    """Rows of the embedding on one rank: the vocabulary padded to a multiple of 128, then to one of the degree."""
    padded = -(-fields["vocab_size"] // 128) * 128
    return -(-padded // tensor)


class Chunks:
    """A weight source: plain chunks of whole tensors."""

    def __init__(self, tensors: Tensors, fields: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self.fields = fields

    def local_tensor(self, parameter: Parameter, tensor: int, rank: int) -> Tensor:
        whole = self.tensors[parameter.name]
        dim = split_dimension(parameter.name, self.fields, tensor)
        if dim is None:
            return whole
        if parameter.name.startswith(("embedding.", "head.")):
            rows = vocabulary_rows(self.fields, tensor)
            return whole[rank * rows : (rank + 1) * rows]
        return whole.chunk(tensor, dim)[rank]


class RecordingEngine(MdspEngine):
    """Keeps each step's gradients as they are before the average over data ranks."""

    last_grads: Tensors

    def _sum_partial_grads(self) -> None:
        super()._sum_partial_grads()
        self.last_grads = {p.entry.name: self._gradient(p).detach().clone() for p in self.module.parameters()}


@contextlib.contextmanager
def own_groups() -> Iterator[None]:
    """Process groups that are created inside are closed at the end: one engine opens a dozen, and many sockets."""
    known = set(dist.distributed_c10d._world.pg_map)
    yield
    dist.barrier()
    for group in set(dist.distributed_c10d._world.pg_map) - known:
        dist.destroy_process_group(group)
    deepspeed.utils.groups._WORLD_GROUP = None  # DeepSpeed keeps its copy of the world here


def local_weights(engine: MdspEngine) -> Tensors:
    """This rank's parameters by table name, fp32."""
    return {p.entry.name: p.detach().float().clone() for p in engine.module.parameters()}


def head_copy(engine: MdspEngine) -> Tensor:
    """The tied weight that this rank holds on the first or the last stage."""
    return engine.module.tied_modules["embedding"].weight.detach().clone()


def micro_batches(batch: Batch, count: int, data: int, data_rank: int) -> Iterator[Any]:
    """One data rank's share: micro-batch m of rank d is samples (m D + d) b ... of the global batch."""
    weights = batch.mask * (count * data) / batch.mask.sum()
    size = len(batch.tokens) // (count * data)
    for index in range(count):
        rows = slice((index * data + data_rank) * size, (index * data + data_rank + 1) * size)
        yield batch.tokens[rows], (batch.labels[rows], weights[rows])


@dataclass(frozen=True)
class RankRun:
    """What one rank saw: per step its loss, the global norm, its gradients and its weights."""

    losses: list[float]
    norms: list[float]
    grads: list[Tensors]
    weights: list[Tensors]


def train_case(case: Case, fields: Mapping[str, Any], initial: Tensors | None) -> RankRun:
    """Train one case on the ranks of this job; without `initial`, from the weights that the seed stands for."""
    source = None if initial is None else Chunks(initial, fields)
    with own_groups():
        engine = build_engine(case.run_config(fields), source, RecordingEngine)
        assert isinstance(engine, RecordingEngine)
        _, data_rank, _ = case.layout.place(dist.get_rank())
        run = RankRun([], [], [], [])
        for step in range(case.steps):
            batch = global_batch(fields["vocab_size"], step)
            loss = engine.train_batch(micro_batches(batch, case.micro_batches, case.layout.data, data_rank))
            run.losses.append(float(loss))
            run.norms.append(float(engine.get_global_grad_norm()))
            run.grads.append(engine.last_grads)
            run.weights.append(local_weights(engine))
        engine.destroy()
    return run


def train_cases(
    cases: Sequence[Case], fields: Mapping[str, Mapping[str, Any]], initial: Mapping[str, Tensors]
) -> list[RankRun]:
    """Several cases, one after the other, in one job."""
    return [train_case(case, fields[case.model], initial[case.model]) for case in cases]
