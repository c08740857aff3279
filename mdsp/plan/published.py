"""Published training runs: one JSON row -> what the planner predicts from, with every assumption and refusal said.

The format is that of the project's collection of published runs (source, model, hardware, layout, result, derived).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdsp.errors import DataError
from mdsp.plan.hardware import TERA, Cluster
from mdsp.plan.layout import Layout, Recompute, Software, Workload
from mdsp.plan.memory import peak_memory
from mdsp.plan.published_fields import (
    Skip,
    cluster_of,
    joined,
    model_of,
    precision_of,
    read_count,
    read_number,
    recompute_of,
    schedule_of,
    software_of,
)

MEMORY_MARGIN = 0.15
"""A published run did fit: where the row hides what it recomputed, tensors may seem this far above the device."""


@dataclass(frozen=True)
class Run:
    """A published run in the planner's terms."""

    id: str
    source: str
    tier: str
    workload: Workload
    layout: Layout
    cluster: Cluster
    software: Software
    open_micro_batch: bool
    """The row does not say the micro-batch."""
    open_virtual: bool
    """The row does not say how many chunks its interleaved schedule has."""
    open_recompute: bool
    """The row does not say what is recomputed."""
    assumed: tuple[str, ...]
    measured_s: float | None
    measured_gib: float | None
    """What tools print, in 2**30 bytes, also where a source writes GB."""
    memory_kind: str
    """allocator, process (nvidia-smi), analytic, or empty."""
    out_of_memory: bool

    @property
    def full_information(self) -> bool:
        """Nothing that changes the time by much had to be guessed."""
        pipelined, batches = self.layout.pipeline > 1, self.layout.micro_batches(self.workload.global_batch)
        if self.open_micro_batch and pipelined:
            return False
        return not (self.open_virtual and (self.layout.pipeline - 1) / batches > 0.15)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; raises `DataError` naming the line."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: a row must be a JSON object")
        rows.append(row)
    return rows


def measured_seconds(row: dict[str, Any]) -> float | None:
    """Seconds per step: printed, or implied by the printed throughput."""
    result, derived = row.get("result") or {}, row.get("derived") or {}
    if (seconds := read_number(result, "iter_s")) is not None:
        return seconds
    for key in ("iter_s_from_tokens_per_s", "iter_s_from_samples_per_s", "iter_s_from_tflops", "iter_s_from_mfu"):
        if (seconds := read_number(derived, key)) is not None:
            return seconds
    batch, seq = read_number(row["layout"], "gbs"), read_number(row["model"], "seq")
    devices = read_number(row["hardware"], "gpus")
    if batch is None or seq is None or devices is None:
        return None
    for key, amount in (("tokens_per_s", seq), ("samples_per_s", 1.0)):
        if (rate := read_number(result, key)) is not None:
            return batch * amount / rate
        if (rate := read_number(result, f"{key}_per_gpu")) is not None:
            return batch * amount / (rate * devices)
    per_token, rate = (
        read_number(derived, "model_flops_per_token_full_attn"),
        read_number(derived, "model_tflops_per_gpu_full_attn"),
    )
    if per_token is not None and rate is not None:
        return per_token * batch * seq / (rate * TERA * devices)
    return None


def published_run(row: dict[str, Any]) -> Run:
    """A row in the planner's terms; raises `Skip` with the reason where the row does not say enough."""
    for section in ("source", "model", "hardware", "layout"):
        if not isinstance(row.get(section), dict):
            raise Skip(f"the row has no {section}")
    tier = str(row.get("tier") or "")
    if tier == "C":
        raise Skip("tier C: contradictory or incomplete in its source")
    assumed: list[str] = []
    given = row["layout"]
    model = model_of(row, assumed)
    seq, batch = read_count(row["model"], "seq"), read_count(given, "gbs")
    if seq is None or batch is None:
        raise Skip("the sequence length or the global batch is not given")
    cluster = cluster_of(row, assumed)
    software = software_of(row, cluster)
    tp, pp, cp = read_count(given, "tp"), read_count(given, "pp"), read_count(given, "cp") or 1
    if tp is None or pp is None:
        raise Skip("the tensor- or pipeline-parallel degree is not given")
    if cluster.devices % (tp * pp * cp):
        raise Skip(f"{cluster.devices} devices are not a multiple of TP {tp} x PP {pp} x CP {cp}")
    if model.n_layers < pp or tp > model.n_heads:
        raise Skip(f"{model.n_layers} layers or {model.n_heads} heads are fewer than PP {pp} or TP {tp}")
    dp = cluster.devices // (tp * pp * cp)
    schedule, described = schedule_of(row), joined(given.get("schedule"))
    virtual = read_count(given, "vpp") or (2 if schedule == "zbv" else 0)
    plain = pp == 1 or "1f1b (deepspeed" in described or described == "1f1b" or schedule not in ("1f1b",)
    open_virtual = not virtual and not plain and not software.deepspeed
    virtual = 1 if pp == 1 else virtual or 1
    micro_batch = read_count(given, "mbs")
    recompute = recompute_of(row)
    sequence_parallel = given.get("sequence_parallel")
    if sequence_parallel is None:
        sequence_parallel = software.overlap_tensor
    zero = given.get("zero")
    if not isinstance(zero, int):
        zero = 3 if "fsdp" in software.name.lower() else 1 if software.deepspeed or software.overlap_data else 0
    layout = Layout(tp, pp, dp, micro_batch or 1, recompute or "none", bool(sequence_parallel) and tp > 1, zero, cp,
                    1 if schedule == "zbv" else virtual, schedule)  # fmt: skip
    result = row.get("result") or {}
    kind = joined(result.get("mem_unit"), result.get("mem_what"))
    memory = read_number(result, "mem_gb")
    memory_kind = (
        "" if memory is None else "analytic" if "analytic" in kind else "process" if "smi" in kind else "allocator"
    )
    return Run(
        id=str(row.get("id")), source=str(row["source"].get("paper")), tier=tier,
        workload=Workload(model, seq, batch, precision_of(row)), layout=layout, cluster=cluster, software=software,
        open_micro_batch=micro_batch is None, open_virtual=open_virtual, open_recompute=recompute is None,
        assumed=tuple(assumed), measured_s=measured_seconds(row), measured_gib=memory, memory_kind=memory_kind,
        out_of_memory=bool(result.get("oom")),
    )  # fmt: skip


def settle(run: Run, seconds: Callable[[Run], float]) -> Run:
    """Fill what the row leaves open.

    Recomputation: the least that fits the device. Micro-batch and chunks per stage: the fastest by `seconds(run)`,
    since that is what the authors of a published run will have used.
    """
    device = run.cluster.device
    room = (1 + MEMORY_MARGIN) * device.memory_bytes + device.host_bytes

    def fits(layout: Layout) -> bool:
        return peak_memory(run.workload, layout, run.software)[1].tensors <= room

    if run.open_recompute:
        modes: tuple[Recompute, ...] = ("none", "selective", "full")
        layouts = [replace(run.layout, recompute=mode) for mode in modes]
        layout = next((layout for layout in layouts if fits(layout)), layouts[-1])
        run = replace(run, layout=layout, assumed=(*run.assumed, f"recompute {layout.recompute}"))
    if not (run.open_micro_batch or run.open_virtual):
        return run
    share = run.workload.global_batch // run.layout.data
    micro = [b for b in (1, 2, 4, 8, 16) if share % b == 0] if run.open_micro_batch else [run.layout.micro_batch]
    layers, stages = run.workload.model.n_layers, run.layout.pipeline
    each = (layers if layers % stages == 0 else layers + 2) // stages  # see `even_stages`
    virtual = [v for v in (1, 2, 3, 4, 5, 6, 8, 12) if each % v == 0] if run.open_virtual else [run.layout.virtual]
    layouts = [replace(run.layout, micro_batch=b, virtual=v) for b in micro or [1] for v in virtual]
    choices = [replace(run, layout=layout) for layout in layouts if fits(layout)]
    if not choices:
        return replace(run, assumed=(*run.assumed, f"micro-batch {run.layout.micro_batch}"))
    best: Run = min(choices, key=seconds)
    said: tuple[str, ...] = (f"micro-batch {best.layout.micro_batch}",) if run.open_micro_batch else ()
    said += (f"{best.layout.virtual} chunks per stage",) if run.open_virtual else ()
    return replace(best, assumed=(*run.assumed, *said))
