"""Why a plan looks as it does: layouts that people expect, what speaks against them, what would make a model fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mdsp.plan.hardware import DEVICES, Cluster
from mdsp.plan.layout import Layout, Workload
from mdsp.plan.memory import state_bytes
from mdsp.plan.search import Candidate, Limits, Plan, search, usable_bytes
from mdsp.plan.step_time import StepTime

TERMS = {
    "matrices": "matrix products",
    "attention": "attention",
    "elementwise": "norms, activations and residuals",
    "head": "vocabulary head",
    "accumulate": "gradient accumulation",
    "tensor": "tensor-parallel communication",
    "pipeline": "communication between stages",
    "imbalance": "unequal stages",
    "bubble": "pipeline bubble",
    "data": "data-parallel communication",
    "optimizer": "optimizer",
    "scale": "stragglers",
}
"""Terms of `StepTime` in words."""

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "overhead": "allocator",
}
"""Parts of `RankMemory` in words."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A layout that people expect, and what speaks against it."""

    what: str
    why: str


def gigabytes(count: float) -> str:
    """Decimal GB: three digits below 10, none above."""
    return (
        f"{count / 1e9:,.0f}" if count >= 9.95e9 else f"{count / 1e9:.1f}" if count >= 0.95e8 else f"{count / 1e9:.2g}"
    )


def describe(layout: Layout) -> str:
    """A layout with everything that distinguishes it."""
    parts = [str(layout), f"micro-batch {layout.micro_batch}"]
    if layout.zero == 0:
        parts.append("ZeRO-0")
    if layout.sequence_parallel:
        parts.append("SP")
    parts.append("no recompute" if layout.recompute == "none" else f"{layout.recompute} recompute")
    return ", ".join(parts)


def shortage(plan: Plan, candidate: Candidate) -> str:
    """What a layout that does not fit is short of: `stage 0 needs 83 of 80 GB (activations 41, optimizer 25)`."""
    parts = sorted(candidate.memory.parts().items(), key=lambda item: -item[1])[:2]
    largest = ", ".join(f"{PARTS[name]} {gigabytes(value)}" for name, value in parts)
    device = plan.cluster.device.memory_bytes
    needs, has = gigabytes(candidate.memory.total), gigabytes(device)
    if candidate.memory.total <= device:
        has = f"{gigabytes(usable_bytes(plan.cluster))} usable"
    return f"stage {candidate.stage} needs {needs} of {has} GB ({largest})"


def slower_because(best: StepTime, other: StepTime) -> str:
    """The term that grows most from one layout to another: `pipeline bubble +1.2 s`."""
    growth = {name: getattr(other, name) - getattr(best, name) for name in TERMS}
    term = max(growth, key=lambda name: growth[name])
    return f"{TERMS[term]} {growth[term]:+.3g} s"


def expected_layouts(plan: Plan) -> list[Reason]:
    """What people expect to see first, and why it is not: one reason per kind of layout that the best one is not."""
    best = plan.fitting[0]
    domain, devices = plan.cluster.link_domain, plan.cluster.devices
    chosen = best.layout
    questions: list[tuple[str, bool, Callable[[Layout], bool]]] = [
        ("no tensor parallelism", chosen.tensor == 1, lambda o: o.tensor == 1),
        (f"TP{domain}, the whole node", chosen.tensor == domain, lambda o: o.tensor == domain),
        (f"TP{2 * domain}", chosen.tensor > domain, lambda o: o.tensor == 2 * domain),
        ("no pipeline", chosen.pipeline == 1, lambda o: o.pipeline == 1),
        ("data parallelism only", chosen.data == devices, lambda o: o.data == devices),
        ("no recomputation", chosen.recompute == "none", lambda o: o.recompute == "none"),
        ("full recomputation", chosen.recompute == "full", lambda o: o.recompute == "full"),
        ("micro-batch 1", chosen.micro_batch == 1, lambda o: o.micro_batch == 1),
        ("no sequence parallelism", not chosen.sequence_parallel, lambda o: o.tensor > 1 and not o.sequence_parallel),
    ]  # fmt: skip
    found = []
    for what, is_chosen, matches in questions:
        if is_chosen:
            continue
        fits = next((c for c in plan.fitting if matches(c.layout)), None)
        if fits is not None:
            slower = fits.seconds / best.seconds - 1
            why = f"{100 * slower:.0f} % slower: {slower_because(best.time, fits.time)}"
            if fits.layout.tensor > domain:
                why = f"leaves the node of {domain}; {why}"
            found.append(Reason(f"{what} ({fits.layout})", why))
            continue
        least = next((c for c in plan.failing if matches(c.layout)), None)
        if least is not None:
            found.append(Reason(f"{what} ({least.layout})", shortage(plan, least)))
    return found


def what_would_fit(plan: Plan) -> str:
    """The message for a request that fits in no layout: what is short, and three ways out."""
    least = plan.failing[0]
    work, cluster = plan.workload, plan.cluster
    ways = []
    nodes = cluster.nodes
    while nodes < 4096:
        nodes *= 2
        bigger = replace(cluster, nodes=nodes)
        if _fits(work, bigger):
            ways.append(f"{nodes} nodes of {cluster.devices_per_node} ({bigger.devices} devices)")
            break
    roomier = sorted(
        (d for d in DEVICES.values() if d.memory_bytes > cluster.device.memory_bytes), key=lambda d: d.memory_bytes
    )
    device = next((d for d in roomier if _fits(work, replace(cluster, device=d))), None)
    if device is not None:
        ways.append(f"devices of {gigabytes(device.memory_bytes)} GB ({device.name})")
    for seq in (work.seq_length // 2, work.seq_length // 4):
        if seq >= 128 and _fits(replace(work, seq_length=seq), cluster):
            ways.append(f"sequences of {seq}")
            break
    way_out = "; it would fit with " + ", or with ".join(ways) if ways else ""
    return (
        f"no layout of {cluster.devices} {cluster.device.name} holds this model: the one that needs least, "
        f"{describe(least.layout)}, is short: {shortage(plan, least)}{way_out}"
    )


def _fits(work: Workload, cluster: Cluster) -> bool:
    from mdsp.errors import ConfigError
    from mdsp.plan.constants import default_constants

    try:
        return bool(search(work, cluster, default_constants().constants, limits=Limits(micro_batch=1)).fitting)
    except ConfigError:
        return False


def state_sentences(parameters: float, work: Workload, plan: Plan) -> list[str]:
    """What weights and training state alone need: `weights 1,060 GB in fp16: at least 14 devices of 80 GB`."""
    device = plan.cluster.device.memory_bytes
    weight, gradient, optimizer = state_bytes(work, replace(plan.software, gradient_bytes=2.0))
    state = weight + gradient + optimizer
    name = {"fp32": "fp32", "bf16": "bf16", "fp8": "bf16"}.get(work.precision, "fp16")
    lines = []
    for what, each in ((f"weights in {name}", weight), (f"training state, {state:g} B each", state)):
        count = -(-parameters * each // device)
        lines.append(
            f"{what}: {gigabytes(parameters * each)} GB, at least {count:,.0f} device{'s' * (count != 1)} "
            f"of {gigabytes(device)} GB"
        )
    return lines


def nearest_better(plan: Plan, layout: Layout, seconds: float, count: int = 3) -> list[Candidate]:
    """Fitting layouts that are faster than one in use, those that change least first."""

    def changes(candidate: Candidate) -> int:
        other = candidate.layout
        names: Iterable[str] = ("tensor", "pipeline", "data", "micro_batch", "recompute", "sequence_parallel")
        return sum(getattr(other, name) != getattr(layout, name) for name in names)

    better = [c for c in plan.fitting if c.seconds < 0.99 * seconds]
    by_change: dict[int, Candidate] = {}
    for candidate in better:
        by_change.setdefault(changes(candidate), candidate)  # sorted by time: the fastest of each distance
    return [by_change[distance] for distance in sorted(by_change)][:count]
