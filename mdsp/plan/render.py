"""The planner's output on a terminal, 80 columns wide or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mdsp.metrics.theory import theoretical_bubble
from mdsp.plan.memory import RankMemory
from mdsp.plan.models import NamedModel
from mdsp.plan.reasons import (
    TERMS,
    Reason,
    describe,
    expected_layouts,
    gigabytes,
    nearest_better,
    shortage,
    state_sentences,
)
from mdsp.plan.search import Candidate, Plan, parameters_on, stage_memory

SHORT_PARTS = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "activ": ("activations",),
    "logits": ("logits",),
    "other": ("buffers", "overhead"),
}
"""Columns of the stage table, and the parts of `RankMemory` in them."""


def quantity(value: float) -> str:
    """1,234,567 -> 1.23 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds below two minutes, else hours or days."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:.3g} h" if seconds < 172800 else f"{seconds / 86400:,.3g} days"


def stages_text(stages: Sequence[int]) -> str:
    """`12 x 8`, or the runs of equal stages: `8, 7 x 14, 6`."""
    runs: list[list[int]] = []
    for blocks in stages:
        if runs and runs[-1][0] == blocks:
            runs[-1][1] += 1
        else:
            runs.append([blocks, 1])
    return ", ".join(f"{blocks} x {times}" if times > 1 else str(blocks) for blocks, times in runs)


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table


def header(console: Console, model: NamedModel, plan: Plan) -> None:
    """What is planned, and what weights and states alone need."""
    work, cluster = plan.workload, plan.cluster
    config = work.model
    console.print(Text(f"{model.name} on {cluster}", style="bold"))
    console.print(
        f"{quantity(model.parameters)} parameters, {config.n_layers} layers x {config.hidden_size}; "
        f"{work.global_batch} sequences of {work.seq_length} per step, {work.precision}"
    )
    for line in state_sentences(model.parameters, work, plan):
        console.print(line)


def ranking(console: Console, plan: Plan, top: int, tokens: float | None) -> None:
    """The fastest layouts, best first."""
    wide = console.width >= 100
    columns = ["", "TP", "PP", "DP", "mb", "M", "recompute", "SP", "GB", "bubble", "step", "+-", "tok/s", "TF/s", "MFU"]
    if tokens:
        columns += ["days"] + (["device-h"] if wide else [])
    table = _table(*columns)
    for rank, candidate in enumerate(plan.distinct[:top], 1):
        layout = candidate.layout
        row = [
            str(rank), str(layout.tensor), str(layout.pipeline), str(layout.data), str(layout.micro_batch),
            str(candidate.time.micro_batches), layout.recompute, "yes" if layout.sequence_parallel else "",
            gigabytes(candidate.memory.total), f"{100 * plan.bubble(candidate):.1f}%", duration(candidate.seconds),
            f"{100 * plan.band:.0f}%", quantity(plan.tokens_per_s(candidate)),
            f"{plan.tflops_per_device(candidate):.0f}", f"{100 * plan.mfu(candidate):.0f}%",
        ]  # fmt: skip
        if tokens:
            row.append(f"{plan.seconds_for(candidate, tokens) / 86400:,.3g}")
            if wide:
                row.append(f"{plan.device_hours(candidate, tokens):,.0f}")
        table.add_row(*row)
    console.print(table)
    shown = min(top, len(plan.distinct))
    console.print(
        Text(
            f"{shown} of {len(plan.distinct)} layouts that fit; {len(plan.failing)} do not. GB: the fullest rank. "
            f"bubble: (P-1)/(M+P-1). TF/s: model FLOPs per device, causal attention halved. +-: 80 % of published "
            f"runs of sources not seen by the fit are within it; measure the best three.",
            style="dim",
        )
    )


def breakdown(console: Console, plan: Plan, candidate: Candidate) -> None:
    """Where the time of a step goes, and what each stage holds."""
    layout = candidate.layout
    console.print()
    console.print(Text(describe(layout), style="bold"))
    devices = " x ".join(str(n) for n in (layout.tensor, layout.pipeline, layout.data))
    console.print(
        f"{plan.cluster.devices:,} = {devices} (TP x PP x DP); blocks per stage: {stages_text(layout.blocks_per_stage)}"
    )
    if layout.pipeline > 1:
        chosen = candidate.time.micro_batches
        counts = sorted({chosen, layout.pipeline, 8 * layout.pipeline})
        theory = ", ".join(f"{100 * theoretical_bubble(layout.pipeline, m):.1f} % at {m}" for m in counts)
        console.print(f"bubble (P-1)/(M+P-1) by micro-batches: {theory}; this layout has {chosen}")
    console.print()
    table = _table("time of a step", "seconds", "share", "")
    total = candidate.seconds
    for name, words in TERMS.items():
        seconds = getattr(candidate.time, name)
        if seconds > 5e-4 * total:
            table.add_row(
                words, f"{seconds:.3g}", f"{100 * seconds / total:.1f}%", Text("#" * round(30 * seconds / total))
            )
    table.add_row("step", f"{total:.3g}", f"+-{100 * plan.band:.0f}%", "", style="bold")
    table.columns[3].justify = "left"
    console.print(table)
    console.print()
    stage_table(console, plan, candidate)


def stage_table(console: Console, plan: Plan, candidate: Candidate) -> None:
    """What a rank of each stage holds, in GB, and its time per micro-batch. Equal neighbours share a line."""
    rows: list[tuple[list[int], tuple[str, ...]]] = []
    for stage, memory in enumerate(stage_memory(plan, candidate)):
        cells = _stage_cells(plan, candidate, stage, memory)
        if rows and rows[-1][1][:3] == cells[:3] and stage < candidate.layout.pipeline - 1 and len(rows) > 2:
            rows[-1][0].append(stage)
        else:
            rows.append(([stage], cells))
    limit = 12
    table = _table("stage", "blocks", "params", *SHORT_PARTS, "GB", "ms")
    shown = rows if len(rows) <= limit else [*rows[: limit - 3], *rows[-2:]]
    for index, (stages, cells) in enumerate(shown):
        if len(rows) > limit and index == limit - 3:
            table.add_row("...")
        label = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        table.add_row(label, *cells)
    console.print(table)
    console.print(Text("GB per rank at its peak; ms: forward and backward of one micro-batch", style="dim"))


def _stage_cells(plan: Plan, candidate: Candidate, stage: int, memory: RankMemory) -> tuple[str, ...]:
    blocks = candidate.layout.stages(plan.workload.model.n_layers)[stage]
    parts = memory.parts()
    return (
        str(blocks),
        quantity(parameters_on(plan, candidate, stage)),
        *[gigabytes(sum(parts[name] for name in names)) for names in SHORT_PARTS.values()],
        gigabytes(memory.total),
        f"{1000 * candidate.time.stage_seconds[stage]:.3g}",
    )


def reasons(console: Console, plan: Plan) -> None:
    """Why the layouts that people expect are not the first."""
    found = expected_layouts(plan)
    if not found:
        return
    console.print()
    console.print(Text("not chosen", style="bold"))
    for reason in found:
        _reason(console, reason)


def _reason(console: Console, reason: Reason) -> None:
    console.print(Padding(Text(f"{reason.what}: {reason.why}"), (0, 0, 0, 2)))


def explained(console: Console, plan: Plan, candidate: Candidate) -> None:
    """An existing layout: what each rank holds and costs, and the nearest better ones."""
    fit = "fits" if candidate.fits else "does not fit: " + shortage(plan, candidate)
    console.print(
        f"step {duration(candidate.seconds)} +-{100 * plan.band:.0f} %, "
        f"{quantity(plan.tokens_per_s(candidate))} tokens/s, "
        f"{plan.tflops_per_device(candidate):.3g} TFLOP/s per device, MFU {100 * plan.mfu(candidate):.1f} %; {fit}"
    )
    breakdown(console, plan, candidate)
    better = nearest_better(plan, candidate.layout, candidate.seconds if candidate.fits else float("inf"))
    console.print()
    if not better:
        console.print("no layout is predicted to be faster by more than 1 %")
        return
    console.print(Text("nearest better layouts", style="bold"))
    for other in better:
        gain = candidate.seconds / other.seconds - 1
        console.print(
            f"  {describe(other.layout)}: step {duration(other.seconds)} ({100 * gain:+.0f} % speed), "
            f"{gigabytes(other.memory.total)} GB"
        )
