"""The time model: seconds of one optimizer step of a layout, term by term. `docs/plan.md` derives every term.

    T = (m t_max + f (sum_i t_i - t_max) / v + t_data + t_optimizer) (1 + c log2(devices / node))

m micro-batches, t_i forward + backward of one micro-batch on stage i, t_max the slowest stage, v chunks per stage, f
the share of the 1F1B bubble that the schedule leaves (Narayanan et al. 2021, eq. 2; Qi et al. 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mdsp.plan.constants import Constants
from mdsp.plan.hardware import Cluster
from mdsp.plan.layout import Layout, ModelSizes, Software, Workload, model_sizes

RESIDUAL_BYTES = 22.0
"""Least forward traffic per token and hidden unit of one block, 16 bit: two norms, two dropout-adds, their reads."""
LOGIT_BYTES = 20.0
"""Traffic per logit, forward and backward: 16-bit logits, fp32 copy, exponentials, gradient."""
OPTIMIZER_BYTES = 30.0
"""Traffic per parameter of an Adam step: fp32 master, two moments (read, write), gradient, 16-bit weight."""
LATENCY_S = 10e-6
"""Start of a collective, times log2 of its ranks."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one block, forward + backward + recomputation, of one micro-batch on one rank."""

    matrices: float
    attention: float
    elementwise: float
    tensor: float
    """Tensor-parallel communication not hidden behind the rest."""
    context: float = 0.0

    @property
    def total(self) -> float:
        return self.matrices + self.attention + self.elementwise + self.tensor + self.context


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; the parts add up to `total`."""

    matrices: float
    attention: float
    elementwise: float
    head: float
    accumulate: float
    tensor: float
    context: float
    pipeline: float
    """Point-to-point communication between stages."""
    imbalance: float
    """What the slowest stage takes beyond the mean stage."""
    bubble: float
    data: float
    """Data-parallel communication not hidden."""
    optimizer: float
    scale: float
    """Stragglers and jitter, growing with the number of devices."""
    micro_batches: int
    stage_seconds: tuple[float, ...]
    """Forward + backward of one micro-batch on each stage."""

    @property
    def total(self) -> float:
        return (
            self.matrices + self.attention + self.elementwise + self.head + self.accumulate + self.tensor + self.context
            + self.pipeline + self.imbalance + self.bubble + self.data + self.optimizer + self.scale
        )  # fmt: skip

    @property
    def bubble_share(self) -> float:
        """Idle share of the pipeline: bubble / (bubble + work of the slowest stage)."""
        work = self.micro_batches * max(self.stage_seconds)
        return self.bubble / (self.bubble + work) if work else 0.0


def gemm_rate(work: Workload, cluster: Cluster, c: Constants) -> tuple[float, float]:
    """FLOP/s of large matrix products (linear layers, everything else): fp8 reaches the linear layers only."""
    device = cluster.device
    share = {"volta": c.gemm_ampere, "ampere": c.gemm_ampere, "hopper": c.gemm_hopper}.get(
        device.architecture, c.gemm_blackwell
    )
    share *= device.power
    if work.precision == "fp32":
        return device.fp32_flops * share, device.fp32_flops * share
    half = device.half_flops * share
    return (device.fp8_flops * share * c.gemm_fp8 if work.precision == "fp8" else half), half


def _products(sizes: ModelSizes) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrix products of one block on one tensor-parallel rank."""
    config, tensor = sizes.config, sizes.tensor
    query = config.n_heads * config.head_dim // tensor
    kv = config.n_kv_heads * config.head_dim // tensor
    if config.n_kv_heads % tensor:
        kv = config.n_kv_heads * config.head_dim
    ffn = config.ffn_size // tensor
    wide = 2 * ffn if config.gated_mlp else ffn
    return [
        (config.hidden_size, query + 2 * kv),
        (query, config.hidden_size),
        (config.hidden_size, wide),
        (ffn, config.hidden_size),
    ]


def gemm_seconds(rows: float, inputs: int, outputs: int, rate: float, hbm: float, half_dim: float) -> float:
    """One product [rows, inputs] x [inputs, outputs]: FLOPs at a rate that short sides lower, or its bytes."""
    shortest = min(rows, inputs, outputs)
    return max(
        2.0 * rows * inputs * outputs / rate * (1 + half_dim / shortest),
        2.0 * (rows * inputs + inputs * outputs + rows * outputs) / hbm,
    )


def _head_dim_penalty(head_dim: int) -> float:
    """Tensor cores need head dimensions in whole tiles (the BigScience topology search measured it)."""
    if head_dim % 16 == 0:
        return 1.0
    return 1.35 if head_dim % 8 == 0 else 10.0


_REPEATED = {"none": 0.0, "selective": 0.0, "full": 1.0, "half": 0.5, "matmul": 0.5}


def layer_time(work: Workload, layout: Layout, cluster: Cluster, software: Software, c: Constants) -> LayerTime:
    """One block on one rank."""
    config, tp, cp = work.model, layout.tensor, layout.context
    sizes = model_sizes(config, tp)
    rows = layout.micro_batch * work.seq_length / cp
    rate, half_rate = gemm_rate(work, cluster, c)
    hbm = cluster.device.hbm_bytes_per_s * c.hbm
    repeated = _REPEATED[layout.recompute]
    forward = sum(gemm_seconds(rows, k, n, rate, hbm, c.gemm_dim) for k, n in _products(sizes))
    matrices = forward * (3 + repeated)

    attention_repeats = 1.0 if layout.recompute in ("selective", "full") else 0.5 if layout.recompute == "half" else 0.0
    span = min(work.seq_length, config.sliding_window or work.seq_length)
    heads = config.n_heads / tp
    core = 4.0 * rows * span * heads * config.head_dim
    elementwise_bytes = 0.0
    if software.flash:
        attention = 0.5 * core * (3.5 + attention_repeats) / (half_rate * c.attention_flash)
    else:
        attention = core * (3 + attention_repeats) / (half_rate * c.attention_core) * _head_dim_penalty(config.head_dim)
        scores = rows * span * heads
        attention += scores * c.softmax_bytes * (2 + attention_repeats) / hbm

    sharded = tp if layout.sequence_parallel else 1
    # read and write: queries, keys, values, the core's output; one (gated: two) inputs and the output of the activation
    heads_traffic = 4.0 * (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim / tp
    activation = config.ffn_size / tp * ((3 if config.gated_mlp else 2) * 2)
    traffic = rows * (RESIDUAL_BYTES * config.hidden_size / sharded + heads_traffic + activation) * (3 + repeated)
    elementwise_bytes += traffic * c.elementwise * (c.eager if software.eager else 1.0)
    elementwise = elementwise_bytes / hbm

    tensor = 0.0
    if tp > 1:
        bandwidth, latency = _group(cluster, tp, 1, c, pooled=False)
        message = 2.0 * rows * config.hidden_size
        collectives = 4 + 2 * repeated
        tensor = collectives * (2 * (tp - 1) / tp * message / bandwidth + latency)
        tensor *= c.tensor_exposed if software.overlap_tensor else 1.0
    context = 0.0
    if cp > 1:
        bandwidth, latency = _group(cluster, cp, tp, c, pooled=False)
        kv = max(1.0, config.n_kv_heads / tp) * config.head_dim
        context = c.tensor_exposed * 3 * ((cp - 1) * 2 * 2.0 * rows * kv / bandwidth + latency)
    return LayerTime(matrices, attention, elementwise, tensor, context)


def head_seconds(work: Workload, layout: Layout, cluster: Cluster, software: Software, c: Constants) -> float:
    """Vocabulary head and loss of one micro-batch, forward and backward: 16 bit also in fp8 runs, never recomputed."""
    rows = layout.micro_batch * work.seq_length / layout.context
    _, half_rate = gemm_rate(work, cluster, c)
    hbm = cluster.device.hbm_bytes_per_s * c.hbm
    columns = -(-work.model.padded_vocab_size // layout.tensor)
    product = 3 * gemm_seconds(rows, work.model.hidden_size, columns, half_rate, hbm, c.gemm_dim)
    return product + rows * columns * LOGIT_BYTES * (c.eager if software.eager else 1.0) / hbm


def _group(cluster: Cluster, ranks: int, stride: int, c: Constants, pooled: bool = True) -> tuple[float, float]:
    """Bandwidth per rank (bytes/s, one direction) and latency of a collective over `ranks` devices `stride` apart.

    Inside a node it is the link. Across nodes each node sends once per ring, so the members that a ring has in a node
    bring their network ports together, up to the link, where messages are large (`pooled`). Collectives inside a layer
    are too small and too frequent for that: they get one port.
    """
    device = cluster.device
    link = device.link_bytes_per_s * c.link
    latency = LATENCY_S * math.log2(max(2, ranks))
    if ranks * stride <= cluster.link_domain:
        return link, latency
    members = max(1, cluster.devices_per_node // stride) if pooled else 1
    return min(link, device.network_bytes_per_s * c.network * members), latency


def step_time(work: Workload, layout: Layout, cluster: Cluster, software: Software, c: Constants) -> StepTime:
    """The time of one step. The layout must be legal (see `search.legal`)."""
    config, tp, pp = work.model, layout.tensor, layout.pipeline
    sizes = model_sizes(config, tp)
    stages = layout.stages(config.n_layers)
    micro_batches = layout.micro_batches(work.global_batch)
    rows = layout.micro_batch * work.seq_length / layout.context
    layer = layer_time(work, layout, cluster, software, c)
    hbm = cluster.device.hbm_bytes_per_s * c.hbm
    head = head_seconds(work, layout, cluster, software, c)
    per_parameter = c.deepspeed_accumulate_bytes if software.deepspeed else c.accumulate_bytes
    pipeline = _point_to_point(rows, config.hidden_size, layout, cluster, software, c)

    gathers = _gather_seconds(work, layout, cluster, software, c) if layout.zero == 3 else 0.0
    seconds, known_seconds, accumulates = [], [], []
    for index in range(pp):
        accumulate = per_parameter * stages[index] * sizes.block / hbm
        known = compute = stages[index] * layer.total + accumulate + (head if index == pp - 1 else 0.0)
        if gathers:
            # Parameters of the next block arrive while this one computes: the longer of the two, and some of the other.
            wait = gathers * sizes.stage(index, stages)
            compute = max(compute, wait) + c.data_exposed * min(compute, wait)
        accumulates.append(accumulate)
        known_seconds.append(known + pipeline)
        seconds.append(compute + pipeline)
    slowest = max(seconds)
    fill = _bubble_factor(layout, c) * (sum(seconds) - slowest) / layout.virtual

    data = _data_seconds(sizes, stages, layout, cluster, software, c)
    optimizer = _optimizer_seconds(sizes, stages, layout, hbm)
    node = cluster.devices_per_node
    slow = c.scale * max(0.0, math.log2(max(1, layout.devices / node)))
    base = micro_batches * slowest + fill + data + optimizer

    # Parts are those of the mean stage; what the slowest takes beyond it is the imbalance.
    waits = sum(second - known for second, known in zip(seconds, known_seconds, strict=True)) / pp
    blocks = micro_batches * config.n_layers / pp
    return StepTime(
        matrices=blocks * layer.matrices,
        attention=blocks * layer.attention,
        elementwise=blocks * layer.elementwise,
        head=micro_batches * head / pp,
        accumulate=micro_batches * sum(accumulates) / pp,
        tensor=blocks * layer.tensor,
        context=blocks * layer.context,
        pipeline=micro_batches * pipeline,
        imbalance=micro_batches * (slowest - sum(seconds) / pp),
        bubble=fill,
        data=data + micro_batches * waits,
        optimizer=optimizer,
        scale=base * slow,
        micro_batches=micro_batches,
        stage_seconds=tuple(seconds),
    )


def _bubble_factor(layout: Layout, c: Constants) -> float:
    """Share of the 1F1B bubble that a schedule leaves (Qi et al. 2023; 2p and V reach about none)."""
    return {"1f1b": 1.0, "gpipe": 1.0, "zb1": c.zb1_bubble, "zb2": 0.05, "zbv": 0.05}[layout.schedule]


def _point_to_point(
    rows: float, hidden: int, layout: Layout, cluster: Cluster, software: Software, c: Constants
) -> float:
    """Seconds per micro-batch: activations forward, gradients back, once per chunk, a slice from each tensor rank."""
    if layout.pipeline == 1:
        return 0.0
    message = 2.0 * rows * hidden / layout.tensor
    neighbour = layout.tensor * layout.data * layout.context
    device = cluster.device
    inside = neighbour * 2 <= cluster.link_domain
    bandwidth = device.link_bytes_per_s * c.link if inside else device.network_bytes_per_s * c.network
    return 2 * layout.virtual * (message / bandwidth + LATENCY_S)


def _gather_seconds(work: Workload, layout: Layout, cluster: Cluster, software: Software, c: Constants) -> float:
    """ZeRO-3: seconds per parameter and micro-batch, two gathers of weights and one reduction of gradients."""
    ranks = layout.data * layout.context
    if ranks == 1:
        return 0.0
    bandwidth, _ = _group(cluster, ranks, layout.tensor, c)
    if software.per_parameter_gather and ranks * layout.tensor > cluster.link_domain:
        bandwidth = cluster.device.network_bytes_per_s * c.network
    volume = 2 * (1.0 if work.precision == "fp8" else 2.0) + software.reduce_bytes
    return volume * (ranks - 1) / ranks / bandwidth


def _data_seconds(
    sizes: ModelSizes, stages: tuple[int, ...], layout: Layout, cluster: Cluster, software: Software, c: Constants
) -> float:
    """Gradient reduction (and, with ZeRO-1, the gather of weights) that the backward pass does not hide."""
    ranks = layout.data * layout.context
    if ranks == 1 or layout.zero == 3:
        return 0.0
    held = max(sizes.stage(i, stages) for i in range(len(stages)))
    bandwidth, latency = _group(cluster, ranks, layout.tensor, c)
    gradient = software.reduce_bytes
    volume = (gradient + (2.0 if layout.zero else gradient)) * held * (ranks - 1) / ranks
    exposed = c.data_exposed if software.overlap_data else min(1.0, 2 * c.data_exposed)
    return exposed * volume / bandwidth + 2 * latency


def _optimizer_seconds(sizes: ModelSizes, stages: tuple[int, ...], layout: Layout, hbm: float) -> float:
    held = max(sizes.stage(i, stages) for i in range(len(stages)))
    return OPTIMIZER_BYTES * held / (layout.data * layout.context if layout.zero else 1) / hbm
