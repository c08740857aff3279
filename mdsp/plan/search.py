"""The search: every layout that mdsp can run on a cluster, what it needs and how long a step takes, best first."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mdsp.config.problems import divisors
from mdsp.config.stages import balance_stages
from mdsp.errors import ConfigError
from mdsp.metrics.flops import model_flops
from mdsp.metrics.theory import theoretical_bubble
from mdsp.model.config import ModelConfig
from mdsp.plan.constants import Constants
from mdsp.plan.hardware import Cluster
from mdsp.plan.layout import Layout, Recompute, Software, Workload, mdsp_software, model_sizes
from mdsp.plan.memory import RankMemory, in_flight, peak_memory, rank_memory
from mdsp.plan.step_time import StepTime, head_seconds, layer_time, step_time

USABLE = 0.97
"""Share of a device's memory that a layout may need; the rest is the device's context and fragmentation."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may choose; None leaves it free."""

    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout, evaluated."""

    layout: Layout
    time: StepTime
    memory: RankMemory
    """Of a rank of `stage`, the one that needs most."""
    stage: int
    fits: bool

    @property
    def seconds(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.time.total


@dataclass(frozen=True)
class Plan:
    """The outcome of a search."""

    workload: Workload
    cluster: Cluster
    software: Software
    constants: Constants
    band: float
    """Relative width of the prediction: 80 % of runs of unseen sources are within it."""
    fitting: tuple[Candidate, ...]
    """Layouts that fit, fastest first."""
    failing: tuple[Candidate, ...]
    """Layouts that do not fit, the least short of memory first."""

    @functools.cached_property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step, causal attention halved (see `mdsp.metrics.flops`)."""
        return self.workload.global_batch * model_flops(self.workload.model, self.workload.seq_length)

    @functools.cached_property
    def distinct(self) -> tuple[Candidate, ...]:
        """`fitting`, of layouts that differ in the division of blocks or the ZeRO stage only the fastest."""
        seen: dict[Layout, Candidate] = {}
        for candidate in self.fitting:
            seen.setdefault(replace(candidate.layout, blocks_per_stage=(), zero=1), candidate)
        return tuple(seen.values())

    @property
    def tokens_per_step(self) -> int:
        return self.workload.global_batch * self.workload.seq_length

    def tokens_per_s(self, candidate: Candidate) -> float:
        return self.tokens_per_step / candidate.seconds

    def tflops_per_device(self, candidate: Candidate) -> float:
        """Model TFLOP/s per device, causal attention halved."""
        return self.flops_per_step / (candidate.seconds * self.cluster.devices) / 1e12

    def mfu(self, candidate: Candidate) -> float:
        """Model FLOP/s over the datasheet peak of the precision."""
        device = self.cluster.device
        peak = {"fp32": device.fp32_flops, "fp8": device.fp8_flops}.get(self.workload.precision, device.half_flops)
        return self.tflops_per_device(candidate) * 1e12 / peak

    def device_hours(self, candidate: Candidate, tokens: float) -> float:
        return self.seconds_for(candidate, tokens) * self.cluster.devices / 3600

    def seconds_for(self, candidate: Candidate, tokens: float) -> float:
        """Seconds that training on so many tokens takes."""
        return tokens / self.tokens_per_s(candidate)

    def bubble(self, candidate: Candidate) -> float:
        """(P - 1) / (M + P - 1)."""
        return theoretical_bubble(candidate.layout.pipeline, candidate.time.micro_batches)


def legal_tensor(config: ModelConfig, tensor: int) -> bool:
    """Whether heads and MLP columns divide; key/value heads are replicated where they do not (`mdsp.config.rules`)."""
    return config.n_heads % tensor == 0 and config.ffn_size % tensor == 0


def usable_bytes(cluster: Cluster) -> float:
    """Memory of one device that a layout may need."""
    return cluster.device.memory_bytes * USABLE


def degrees(work: Workload, cluster: Cluster, limits: Limits) -> Iterator[tuple[int, int, int]]:
    """(tensor, pipeline, data) that multiply to the number of devices and that the model and the batch allow."""
    config, devices = work.model, cluster.devices
    for tensor in divisors(devices):
        if limits.tensor not in (None, tensor) or not legal_tensor(config, tensor):
            continue
        if limits.tensor is None and tensor > 2 * cluster.link_domain:
            continue
        for pipeline in divisors(devices // tensor):
            if limits.pipeline not in (None, pipeline) or pipeline > config.n_layers:
                continue
            data = devices // (tensor * pipeline)
            if work.global_batch % data == 0:
                yield tensor, pipeline, data


def zero_stages(work: Workload, pipeline: int) -> tuple[int, ...]:
    """ZeRO stages that mdsp runs: 1, and 0 without a pipeline and without bf16 (`mdsp.config.deepspeed_rules`)."""
    return (1, 0) if pipeline == 1 and work.precision in ("fp16", "fp32") else (1,)


def micro_batch_sizes(share: int, limits: Limits) -> list[int]:
    """Micro-batches that divide a data-parallel rank's share of the global batch."""
    sizes = MICRO_BATCHES if limits.micro_batch is None else (limits.micro_batch,)
    return [size for size in sizes if share % size == 0]


def search(
    work: Workload,
    cluster: Cluster,
    constants: Constants,
    band: float = 0.0,
    limits: Limits = Limits(),
    software: Software | None = None,
) -> Plan:
    """Evaluate all legal layouts.

    Raises ConfigError when no factorisation is legal at all. A layout that does not fit is kept in `failing` with its
    predicted time, because people ask why it was not chosen.
    """
    software = software or mdsp_software(work.precision)
    fitting: list[Candidate] = []
    failing: list[Candidate] = []
    found = False
    for tensor, pipeline, data in degrees(work, cluster, limits):
        for layout in _layouts(work, cluster, constants, software, limits, tensor, pipeline, data):
            found = True
            candidate = evaluate(work, layout, cluster, software, constants)
            (fitting if candidate.fits else failing).append(candidate)
    if not found:
        raise ConfigError(_no_factorisation(work, cluster, limits))
    fitting.sort(key=lambda c: c.seconds)
    failing.sort(key=lambda c: c.memory.total)
    return Plan(work, cluster, software, constants, band, tuple(fitting), tuple(failing))


def evaluate(work: Workload, layout: Layout, cluster: Cluster, software: Software, constants: Constants) -> Candidate:
    """Time and memory of one layout."""
    stage, memory = peak_memory(work, layout, software)
    time = step_time(work, layout, cluster, software, constants)
    return Candidate(layout, time, memory, stage, memory.total <= usable_bytes(cluster))


def _layouts(
    work: Workload, cluster: Cluster, constants: Constants, software: Software, limits: Limits,
    tensor: int, pipeline: int, data: int,
) -> Iterator[Layout]:  # fmt: skip
    share = work.global_batch // data
    parallel: Sequence[bool] = (False, True) if tensor > 1 and work.seq_length % tensor == 0 else (False,)
    if limits.sequence_parallel is not None:
        parallel = [choice for choice in parallel if choice == limits.sequence_parallel]
    modes = RECOMPUTE if limits.recompute is None else (limits.recompute,)
    if software.flash and limits.recompute is None:
        modes = tuple(mode for mode in modes if mode != "selective")  # flash attention already keeps no scores
    for micro_batch in micro_batch_sizes(share, limits):
        for sequence_parallel in parallel:
            for recompute in modes:
                layout = Layout(tensor, pipeline, data, micro_batch, recompute, sequence_parallel)
                for stages in _stage_choices(work, layout, cluster, software, constants):
                    for zero in zero_stages(work, pipeline):
                        yield replace(layout, blocks_per_stage=stages, zero=zero)


def _stage_choices(
    work: Workload, layout: Layout, cluster: Cluster, software: Software, constants: Constants
) -> list[tuple[int, ...]]:
    """Equal stages (or as equal as they get), and stages balanced by predicted time where these differ."""
    config = work.model
    if layout.pipeline == 1:
        return [(config.n_layers,)]
    block = layer_time(work, layout, cluster, software, constants).total
    extra = head_seconds(work, layout, cluster, software, constants)
    balanced = _balanced(config.n_layers, layout.pipeline, round(64 * extra / block))
    equal = _balanced(config.n_layers, layout.pipeline, 0)
    return [balanced] if balanced == equal else [balanced, equal]


@functools.lru_cache(maxsize=4096)
def _balanced(layers: int, stages: int, extra: int) -> tuple[int, ...]:
    """Blocks per stage when the head costs `extra` / 64 of a block."""
    return balance_stages([64.0] * layers, 0.0, float(extra), stages)


def _no_factorisation(work: Workload, cluster: Cluster, limits: Limits) -> str:
    config, devices = work.model, cluster.devices
    said = [f"no layout of {devices} devices is legal for this model and a global batch of {work.global_batch}"]
    if limits.tensor and not legal_tensor(config, limits.tensor):
        legal = [t for t in range(1, config.n_heads + 1) if legal_tensor(config, t)]
        said.append(
            f"tensor {limits.tensor} must divide {config.n_heads} heads and {config.ffn_size} MLP columns: {legal[:12]}"
        )
    if limits.pipeline and limits.pipeline > config.n_layers:
        said.append(f"pipeline {limits.pipeline} is more than {config.n_layers} layers")
    datas = sorted(
        {
            devices // (t * p)
            for t in divisors(devices)
            if legal_tensor(config, t)
            for p in divisors(devices // t)
            if p <= config.n_layers
        }
    )
    if datas and not (limits.tensor or limits.pipeline):
        nearest = min(datas, key=lambda d: abs(work.global_batch - round(work.global_batch / d) * d or d))
        batch = max(1, round(work.global_batch / nearest)) * nearest
        said.append(
            f"data-parallel degrees could be {datas[:12]}, and the global batch must be a multiple; nearest: {batch}"
        )
    elif not datas:
        said.append(
            f"tensor x pipeline x data must be {devices}, and {config.n_heads} heads and {config.n_layers} layers "
            f"allow no such factors"
        )
    return "; ".join(said)


def stage_memory(plan: Plan, candidate: Candidate) -> list[RankMemory]:
    """What a rank of each stage holds."""
    return [rank_memory(plan.workload, candidate.layout, plan.software, s) for s in range(candidate.layout.pipeline)]


def held_micro_batches(candidate: Candidate, stage: int) -> float:
    """Micro-batches in flight on a stage."""
    return in_flight(candidate.layout, stage, candidate.time.micro_batches)


def parameters_on(plan: Plan, candidate: Candidate, stage: int) -> int:
    """Parameters that one rank of a stage holds."""
    layout, config = candidate.layout, plan.workload.model
    return model_sizes(config, layout.tensor).stage(stage, layout.stages(config.n_layers))
