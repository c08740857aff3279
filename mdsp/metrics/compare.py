"""Several runs side by side: a table of what differs and what came out, and overlaid curves. No torch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdsp.metrics.report import kinds_for_page, line, page
from mdsp.metrics.run import Run

_CURVES: tuple[tuple[str, str, str, float, bool], ...] = (
    ("loss", "Loss", "", 1.0, False),
    ("eval_loss", "Loss on held-out text", "", 1.0, False),
    ("lr", "Learning rate", "", 1.0, True),
    ("tokens_per_s", "Tokens per second", "tokens/s", 1.0, True),
    ("model_tflops_per_device", "Model TFLOP/s per device (causal attention halved)", "TFLOP/s", 1.0, True),
    ("mfu", "Model FLOPs utilisation", "%", 100.0, True),
    ("bubble_measured", "Pipeline bubble, measured", "%", 100.0, True),
    ("grad_norm", "Gradient norm before clipping", "", 1.0, True),
)
_RESULTS: tuple[tuple[str, str, float, str], ...] = (
    ("step", "steps", 1.0, ",.0f"),
    ("loss", "training loss", 1.0, ".4f"),
    ("eval_loss", "held-out loss", 1.0, ".4f"),
    ("tokens", "tokens trained on", 1.0, ",.0f"),
    ("tokens_per_s", "tokens/s, median", 1.0, ",.0f"),
    ("step_s", "seconds per step, median", 1.0, ".3f"),
    ("model_tflops_per_device", "model TFLOP/s per device, median", 1.0, ".4g"),
    ("mfu", "MFU %, median", 100.0, ".1f"),
    ("bubble_measured", "bubble %, measured, median", 100.0, ".1f"),
    ("bubble_theory", "bubble %, theory", 100.0, ".1f"),
)


@dataclass(frozen=True)
class Comparison:
    """Rows of text: a title and one cell per run."""

    names: list[str]
    results: list[tuple[str, list[str]]]
    differences: list[tuple[str, list[str]]]
    """Keys of the configurations whose values are not the same in all runs."""


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested configuration as dotted keys."""
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for key, item in value.items():
            found.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
        return found
    return {prefix: str(value)}


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def compare(runs: Sequence[Run]) -> Comparison:
    """What differs and what came out. Rates are medians over all steps, so that a slow first step does not count."""
    results = []
    for field, title, scale, form in _RESULTS:
        cells = []
        for run in runs:
            found = [value for _, value in run.series(field)]
            value = None if not found else _median(found) if title.endswith("median") else found[-1]
            cells.append("" if value is None else format(value * scale, form))
        if any(cells):
            results.append((title, cells))
    # Where a run lies and what it is called says nothing about why it is faster.
    ignored = ("mdsp.monitor.dir", "mdsp.checkpoint.dir")
    configurations = [
        flatten({name: run.info[name] for name in ("layout", "model", "deepspeed", "mdsp") if name in run.info})
        for run in runs
    ]
    keys = dict.fromkeys(key for configuration in configurations for key in configuration if key not in ignored)
    differences = []
    for key in keys:
        cells = [configuration.get(key, "") for configuration in configurations]
        if len(set(cells)) > 1:
            differences.append((key, cells))
    return Comparison(_distinct_names(runs), results, differences)


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.directory) for name, run in zip(names, runs, strict=True)]


def render_comparison(runs: Sequence[Run]) -> str:
    """The page: two tables and a chart per series with a line per run."""
    found = compare(runs)
    named = [(run, name, f"c{index % 8}") for index, (run, name) in enumerate(zip(runs, found.names, strict=True))]
    charts = [
        dict(
            id=field,
            title=title,
            unit=unit,
            from_zero=from_zero,
            series=[line(run, field, name, color, scale) for run, name, color in named],
        )
        for field, title, unit, scale, from_zero in _CURVES
    ]
    body = _table("Results", "results", found.names, found.results)
    if found.differences:
        body += _table("Configuration, where it differs", "differences", found.names, found.differences)
    body += '<div class="charts" id="charts"></div>'
    data = dict(charts=charts, parts=[], kinds=kinds_for_page(), timelines=[])
    return page("Comparison of runs", ", ".join(found.names), body, data)


def _table(title: str, name: str, heads: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    def cells(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    body = "".join(cells("td", (first, *rest)) for first, rest in rows)
    return (
        f'<section class="card"><h2>{html.escape(title)}</h2><div class="scroll tall"><table id="{name}">'
        f"<thead>{cells('th', ('', *heads))}</thead><tbody>{body}</tbody></table></div></section>"
    )
