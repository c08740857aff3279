"""The picture of a plan as one self-contained HTML page: inline SVG, no script library, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from mdsp.plan.plot import PASS_COLOURS, RECOMPUTE_COLOURS, Picture, layout_label, named, timeline_title
from mdsp.plan.search import Candidate
from mdsp.plan.timeline import span

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 1040, 460, 64, 44, 14
GUTTER = 190
"""Room for names between the axis and the points."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2328; --soft: #6b7680; --rule: #d8dde1; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --soft: #98a3ab; --rule: #3a444b; --paper: #171c20; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 24px auto; max-width: 1080px; padding: 0 16px; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 24px 0 6px; }
p { color: var(--soft); margin: 0 0 8px; }
svg { width: 100%; height: auto; display: block; } text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.axis { stroke: var(--rule); } .front { stroke: var(--ink); fill: none; }
.limit { stroke: #b22222; stroke-dasharray: 5 4; }
.lead { stroke: var(--soft); stroke-width: .6; } .chosen { stroke: var(--ink); fill: none; stroke-width: 1.8; }
.key span { margin-right: 16px; white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 5px; }
"""


def page(drawn: Picture) -> str:
    """The page."""
    title = escape(f"{drawn.title} on {drawn.plan.cluster}")
    plan = drawn.plan
    count = f"{len(plan.fitting)} layouts fit, {len(plan.failing)} do not (hollow). Point at one for its numbers."
    keys = "".join(f'<span><i style="background:{c}"></i>recompute {r}</span>' for r, c in RECOMPUTE_COLOURS.items())
    passes = "".join(f'<span><i style="background:{c}"></i>{k}</span>' for k, c in PASS_COLOURS.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n<p>{count}</p>\n"
        f'<h2>Step time against memory</h2>\n<p class="key">{keys}<span>line: Pareto front</span></p>\n'
        f"{_scatter(drawn)}\n"
        f'<h2>{escape(timeline_title(drawn))}</h2>\n<p class="key">{passes}</p>\n{_gantt(drawn)}\n</body></html>\n'
    )


def _ticks(low: float, high: float, count: int = 7) -> list[float]:
    """Round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step)
    return [step * i for i in range(first, int(high / step) + 1)]


def _scatter(drawn: Picture) -> str:
    memories = [c.memory.total / 1e9 for c in drawn.shown] + [drawn.device_bytes / 1e9]
    times = [c.seconds for c in (*drawn.shown, drawn.chosen)]
    right, low, high = 1.03 * max(memories), min(times) * 0.94, max(times) * 1.04

    def x(gigabytes: float) -> float:
        return LEFT + GUTTER + (WIDTH - LEFT - GUTTER - 10) * gigabytes / right

    def y(seconds: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * math.log(high / seconds) / math.log(high / low)

    parts = [_axes(x, y, _ticks(0, right), _ticks(low, high), "memory of the fullest rank, GB", "step time, s")]
    limit = x(drawn.device_bytes / 1e9)
    parts.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for candidate in drawn.shown:
        colour = RECOMPUTE_COLOURS[candidate.layout.recompute]
        fill = colour if candidate.fits else "none"
        parts.append(
            f'<circle cx="{x(candidate.memory.total / 1e9):.1f}" cy="{y(candidate.seconds):.1f}" r="3.4" fill="{fill}" '
            f'stroke="{colour}" opacity="{0.85 if candidate.fits else 0.4}">'
            f"<title>{_tip(drawn, candidate)}</title></circle>"
        )
    points = " ".join(f"{x(c.memory.total / 1e9):.1f},{y(c.seconds):.1f}" for c in drawn.front)
    parts.append(f'<polyline class="front" points="{points}"/>')
    parts.append(
        f'<circle class="chosen" cx="{x(drawn.chosen.memory.total / 1e9):.1f}" '
        f'cy="{y(drawn.chosen.seconds):.1f}" r="7"/>'
    )
    names = sorted(named(drawn), key=lambda c: -c.seconds)
    for index, candidate in enumerate(names):
        height = HEIGHT - BOTTOM - 14 - 17 * (len(names) - 1 - index)
        px, py = x(candidate.memory.total / 1e9), y(candidate.seconds)
        label = layout_label(candidate.layout)
        parts.append(
            f'<line class="lead" x1="{LEFT + 12 + 6.1 * len(label):.0f}" y1="{height - 4}" '
            f'x2="{px:.1f}" y2="{py:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT + 8}" y="{height}">{escape(label)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _tip(drawn: Picture, candidate: Candidate) -> str:
    fits = "" if candidate.fits else ", does not fit"
    parallel = " SP" if candidate.layout.sequence_parallel else ""
    return escape(
        f"{layout_label(candidate.layout)}{parallel}: {candidate.seconds:.3g} s, "
        f"{candidate.memory.total / 1e9:.0f} GB, {drawn.plan.tflops_per_device(candidate):.0f} TFLOP/s{fits}"
    )


def _axes(x: Callable[[float], float], y: Callable[[float], float], across: list[float], up: list[float],
          under: str, beside: str) -> str:  # fmt: skip
    parts = []
    for value in across:
        parts.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for value in up:
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{under}</text>')
    parts.append(f'<text transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{beside}</text>')
    return "".join(parts)


def _gantt(drawn: Picture) -> str:
    stages, total = drawn.chosen.layout.pipeline, span(list(drawn.passes)) or 1.0
    row = max(6.0, min(26.0, 420 / stages))
    height = row * stages + 40
    scale = (WIDTH - LEFT - 10) / total
    every = max(1, round(14 / row))
    parts = [
        f'<text x="{LEFT - 8}" y="{row * s + row * 0.7:.1f}" text-anchor="end">{s}</text>'
        for s in range(0, stages, every)
    ]
    for p in drawn.passes:
        parts.append(
            f'<rect x="{LEFT + p.start_s * scale:.2f}" y="{row * p.stage + 1:.1f}" '
            f'width="{max(0.4, (p.end_s - p.start_s) * scale - 0.3):.2f}" height="{row - 2:.1f}" '
            f'fill="{PASS_COLOURS[p.kind]}"><title>stage {p.stage}, {p.kind} of micro-batch {p.micro_batch}: '
            f"{1000 * (p.end_s - p.start_s):.3g} ms at {p.start_s:.4g} s</title></rect>"
        )
    for value in _ticks(0, total):
        parts.append(
            f'<text x="{LEFT + value * scale:.1f}" y="{row * stages + 16:.1f}" text-anchor="middle">{value:g}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{row * stages + 34:.1f}" text-anchor="middle">'
        "seconds; one row per stage</text>"
    )
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
