"""One self-contained HTML page about a run: it loads nothing from elsewhere, so it can be mailed and kept. No torch."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from mdsp.metrics.advice import Advice, advise
from mdsp.metrics.bubble import PART_NAMES, StepBubble
from mdsp.metrics.run import Run
from mdsp.metrics.series import PART_TITLES
from mdsp.metrics.timeline import COMPUTE_KINDS, KINDS, Instruction, InstructionKind, pack

MAX_POINTS = 1500
"""Points of one line; longer series are thinned, keeping the lowest and the highest value of every stretch."""
MAX_INSTRUCTIONS = 150_000
"""Instructions in one page; the newest of the sampled steps are kept."""

_SECTIONS: dict[str, str] = {
    "environment": "Environment",
    "model": "Model",
    "deepspeed": "Configuration: DeepSpeed",
    "mdsp": "Configuration: mdsp",
}
"""Sections of `run.json` that the page shows folded."""

_PART_COLORS: dict[str, str] = {"compute": "forward", "data_parallel": "reduce", "data": "load"}
_KIND_COLORS: dict[InstructionKind, tuple[str, str]] = {
    "send_activation": ("send", "send, waiting included"),
    "send_grad": ("send", "send, waiting included"),
    "recv_activation": ("recv", "receive, waiting included"),
    "recv_grad": ("recv", "receive, waiting included"),
    "reduce_tied": ("reduce", "reduce gradients, waiting included"),
    "reduce_grads": ("reduce", "reduce gradients, waiting included"),
    "optimizer": ("optimizer", "optimizer, waiting included"),
}


def thin(points: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most `limit` points that look the same: of every stretch the lowest and the highest, and both ends."""
    if len(points) <= limit:
        return list(points)
    kept = {0, len(points) - 1}
    stretches = limit // 2 - 1
    for index in range(stretches):
        stretch = range(index * len(points) // stretches, (index + 1) * len(points) // stretches)
        kept.add(min(stretch, key=lambda i: points[i][1]))
        kept.add(max(stretch, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def line(run: Run, field: str, name: str, color: str, scale: float = 1.0, dashed: bool = False) -> dict[str, Any]:
    """One line of a chart."""
    points = [(step, value * scale) for step, value in thin(run.series(field))]
    return dict(name=name, color=color, dashed=dashed, points=points)


def _charts(run: Run) -> list[dict[str, Any]]:
    def chart(name: str, title: str, unit: str, from_zero: bool, *lines: dict[str, Any]) -> dict[str, Any]:
        return dict(id=name, title=title, unit=unit, from_zero=from_zero, series=lines)

    def recomputing(hardware: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """The line, unless nothing is recomputed and it would only cover the model's."""
        differ = any(row.get("hardware_tflops_per_device") != row.get("model_tflops_per_device") for row in run.steps)
        return (hardware,) if differ else ()

    return [
        chart("loss", "Loss", "", False, line(run, "loss", "training", "c0"), line(run, "eval_loss", "held out", "c1")),
        chart("lr", "Learning rate", "", True, line(run, "lr", "learning rate", "c3")),
        chart(
            "tflops",
            "TFLOP/s per device (causal attention halved)",
            "TFLOP/s",
            True,
            line(run, "model_tflops_per_device", "model", "c0"),
            *recomputing(line(run, "hardware_tflops_per_device", "hardware (with recomputation)", "c4")),
        ),
        chart(
            "mfu",
            "Utilisation of the device's peak",
            "%",
            True,
            line(run, "mfu", "MFU", "c0", 100),
            *recomputing(line(run, "hfu", "HFU", "c4", 100)),
        ),
        chart(
            "bubble",
            "Pipeline bubble",
            "%",
            True,
            line(run, "bubble_measured", "measured", "c5", 100),
            line(run, "bubble_theory", "theory of the schedule", "c6", 100, dashed=True),
        ),
        chart("tokens", "Tokens per second", "tokens/s", True, line(run, "tokens_per_s", "tokens/s", "c2")),
        chart("grad_norm", "Gradient norm before clipping", "", True, line(run, "grad_norm", "gradient norm", "c7")),
    ]


def _part_rows(run: Run) -> list[dict[str, Any]]:
    rows = [dict(step=row["step"], seconds=row["bubble_parts_s"]) for row in run.steps if row.get("bubble_parts_s")]
    every = -(-len(rows) // 60)
    return [
        dict(step=row["step"], seconds={name: row["seconds"].get(name, 0.0) for name in PART_NAMES})
        for row in rows[:: every or 1]
    ]


def _timeline(
    run: Run, row: dict[str, Any], step: int, instructions: Sequence[Instruction], bubble: StepBubble
) -> dict[str, Any]:
    start = min(i.start_s for i in instructions)
    ranks = {s.stage: min(i.rank for i in instructions if i.stage == s.stage) for s in bubble.stages}
    shown = [i for i in instructions if i.rank == ranks[i.stage]]
    memory = row.get("memory_bytes") or ()
    blocks = blocks_per_stage(run) or ()
    return dict(
        step=step,
        length_s=bubble.step_s,
        bubble=bubble.bubble,
        theory=bubble.theory,
        instructions=[
            [s, r, k, m, round(left - start, 6), round(right - start, 6)] for s, r, k, m, left, right in pack(shown)
        ],
        stages=[
            dict(
                stage=s.stage,
                busy_s=s.busy_s,
                bubble=s.bubble,
                seconds=s.parts.as_dict(),
                blocks=blocks[s.stage] if s.stage < len(blocks) else None,
                memory_bytes=memory[s.stage] if s.stage < len(memory) else None,
            )
            for s in bubble.stages
        ],
    )


def _chosen_timelines(run: Run, steps: Sequence[int] | None) -> list[dict[str, Any]]:
    chosen = [s for s in (run.timelines if steps is None else steps) if s in run.timelines]
    rows = {row["step"]: row for row in run.steps}
    found: list[dict[str, Any]] = []
    total = 0
    for step in reversed(chosen):
        total += len(run.timelines[step])
        if found and total > MAX_INSTRUCTIONS:
            break
        found.append(_timeline(run, rows.get(step, {}), step, run.timelines[step], run.analyse(step)))
    return found[::-1]


def blocks_per_stage(run: Run) -> Sequence[int] | None:
    """Transformer blocks of each stage, when the run says so."""
    found = (run.info.get("layout") or {}).get("blocks_per_stage")
    return found if isinstance(found, list) else None


def run_advice(run: Run) -> Advice | None:
    """Advice from the newest sampled step."""
    if not run.timelines:
        return None
    bubble = run.analyse(next(reversed(run.timelines)))
    return advise(bubble, run.info.get("schedule", "1f1b"), blocks_per_stage(run))


def _tiles(run: Run) -> str:
    def tile(name: str, value: float | None, form: str, title: str, scale: float = 1.0) -> str:
        if value is None:
            return ""
        text = format(value * scale, form)
        return f'<div class="tile" data-key="{name}"><b>{text}</b><span>{html.escape(title)}</span></div>'

    steps = len(run.steps)
    return "".join(
        (
            tile("steps", run.steps[-1]["step"] if steps else None, ",.0f", "steps"),
            tile("loss", run.last("loss"), ".4f", "training loss"),
            tile("eval_loss", run.last("eval_loss"), ".4f", "held-out loss"),
            tile("tokens", run.last("tokens"), ",.0f", "tokens trained on"),
            tile("tokens_per_s", run.last("tokens_per_s"), ",.0f", "tokens/s"),
            tile("model_tflops_per_device", run.last("model_tflops_per_device"), ".3g", "model TFLOP/s per device"),
            tile("mfu", run.last("mfu"), ".1f", "MFU %", 100),
            tile("step_s", run.last("step_s"), ".3f", "seconds per step"),
            tile("bubble_measured", run.last("bubble_measured"), ".1f", "bubble %, measured", 100),
            tile("bubble_theory", run.last("bubble_theory"), ".1f", "bubble %, theory", 100),
            tile("parameters_m", run.info.get("parameters"), ",.1f", "million parameters", 1e-6),
        )
    )


def _definitions(values: dict[str, Any]) -> str:
    rows = (f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd>" for k, v in values.items())
    return f"<dl>{''.join(rows)}</dl>"


def page(title: str, subtitle: str, body: str, data: dict[str, Any]) -> str:
    """The HTML document around `body`; `data` is what `assets/page.js` draws."""
    assets = files("mdsp.metrics") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # A "<" in the data could end the script element that carries it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title, subtitle = html.escape(title), html.escape(subtitle)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><header><h1>{title}</h1><span class="soft">{subtitle}</span><button id="theme">dark</button></header>
{body}</main><div id="tip"></div>
<script type="application/json" id="data">{text}</script><script>{script}</script></body></html>
"""


def kinds_for_page() -> list[dict[str, Any]]:
    """Name, words, colour and legend of every kind of instruction, in the order of `timeline.KINDS`."""
    found = []
    for kind in KINDS:
        words = kind.replace("_", " ")
        color, legend = _KIND_COLORS.get(kind, (kind, words))
        found.append(dict(name=kind, title=words, color=color, legend=legend, compute=kind in COMPUTE_KINDS))
    return found


def render_report(run: Run, steps: Sequence[int] | None = None) -> str:
    """The page of a run; `steps` choose the timelines (default: as many of the newest as a page can hold)."""
    advice = run_advice(run)
    layout = run.info.get("layout") or {}
    subtitle = ", ".join(f"{name.replace('_', ' ')} {v}" for name, v in layout.items() if isinstance(v, int))
    body = [f'<div class="tiles">{_tiles(run)}</div>']
    if advice is not None:
        body.append(f'<div class="card advice" id="advice"><b>Advice.</b> {html.escape(advice.sentence)}</div>')
    body.append('<div class="charts" id="charts"></div>')
    timelines = _chosen_timelines(run, steps)
    if timelines:
        body.append(
            '<section class="card" id="gantt-card"><h2>Timeline</h2><div class="row"><select id="step" '
            'aria-label="step"></select><button id="in" aria-label="zoom in">+</button><button id="out" '
            'aria-label="zoom out">-</button><span class="soft" id="gantt-title"></span></div>'
            '<canvas id="gantt" aria-label="instructions over time, a row per stage"></canvas></section>'
            '<section class="card"><h2>Stages</h2><div class="scroll tall"><table id="stages"></table></div></section>'
        )
    if run.events:
        lines = "\n".join(json.dumps(event) for event in run.events[-200:])
        body.append(f'<section class="card"><details><summary>Events</summary><pre>{html.escape(lines)}</pre>')
        body.append("</details></section>")
    for name in _SECTIONS:
        value = run.info.get(name)
        if isinstance(value, dict):
            inside = _definitions(value) if name == "environment" else ""
            inside = inside or f"<pre>{html.escape(json.dumps(value, indent=2))}</pre>"
            body.append(
                f'<section class="card"><details><summary>{name.capitalize()}</summary>{inside}</details></section>'
            )
    data = dict(
        charts=_charts(run),
        parts=[dict(name=n, title=PART_TITLES[n], color=_PART_COLORS.get(n, n)) for n in PART_TITLES],
        part_rows=_part_rows(run),
        kinds=kinds_for_page(),
        timelines=timelines,
    )
    return page(run.name, subtitle, "\n".join(body), data)
