"""Pictures of a plan: step time against memory with the Pareto front, and the predicted timeline of one layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mdsp.errors import ConfigError
from mdsp.output_file import write_output
from mdsp.plan.layout import Layout
from mdsp.plan.search import Candidate, Plan
from mdsp.plan.timeline import Pass, predicted_timeline, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 6
"""Layouts of the front that get a name."""
SHOWN_STAGES, SHOWN_MICRO_BATCHES = 64, 48
RECOMPUTE_COLOURS = {"none": "#2c7fb8", "selective": "#7fcdbb", "full": "#d95f0e"}
PASS_COLOURS = {"forward": "#4c9f70", "backward": "#3b6ea8"}
FAR = 3.0
"""Layouts slower than this many times the best are left out: they would squeeze the rest."""


@dataclass(frozen=True)
class Picture:
    """What both formats draw."""

    title: str
    plan: Plan
    chosen: Candidate
    shown: tuple[Candidate, ...]
    """All layouts within reach of the best, fitting or not."""
    front: tuple[Candidate, ...]
    passes: tuple[Pass, ...]
    complete: bool
    """Whether `passes` is the whole step, not its first micro-batches."""

    @property
    def device_bytes(self) -> float:
        return self.plan.cluster.device.memory_bytes


def layout_label(layout: Layout) -> str:
    """Short name of a layout."""
    extra = "" if layout.recompute == "none" else f" {layout.recompute}"
    return f"TP{layout.tensor} PP{layout.pipeline} DP{layout.data} mb{layout.micro_batch}{extra}"


def pareto_front(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Layouts that no other beats in both step time and memory, fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.memory.total)):
        if not front or candidate.memory.total < front[-1].memory.total:
            front.append(candidate)
    return tuple(front)


def picture(title: str, plan: Plan, chosen: Candidate) -> Picture:
    """Everything that is drawn, computed once."""
    best = min([chosen.seconds, *(c.seconds for c in plan.fitting[:1])])
    far = FAR * best
    shown = tuple(
        c for c in (*plan.fitting, *plan.failing)
        if c.seconds <= far and c.memory.total <= 3 * plan.cluster.device.memory_bytes
    )  # fmt: skip
    count = chosen.time.micro_batches
    whole = chosen.layout.pipeline * count <= SHOWN_STAGES * SHOWN_MICRO_BATCHES
    passes = predicted_timeline(chosen, 0 if whole else max(SHOWN_MICRO_BATCHES, chosen.layout.pipeline))
    return Picture(title, plan, chosen, shown, pareto_front(tuple(c for c in shown if c.fits)), tuple(passes), whole)


def plot(path: str, title: str, plan: Plan, chosen: Candidate) -> None:
    """Write the picture as .png or as a self-contained .html; raises ConfigError for another ending."""
    drawn = picture(title, plan, chosen)
    if path.endswith(".png"):
        _png(path, drawn)
    elif path.endswith((".html", ".htm")):
        from mdsp.plan.plot_html import page

        write_output(Path(path), page(drawn))
    else:
        raise ConfigError(f"--plot {path}: the name must end in .png or .html")


def named(drawn: Picture) -> list[Candidate]:
    """The layouts of the front that get a name: both ends and some between, well apart, and the chosen one."""
    front = list(drawn.front)
    if len(front) > NAMED:
        step = (len(front) - 1) / (NAMED - 1)
        front = [front[round(i * step)] for i in range(NAMED)]
    return front if drawn.chosen in front else [drawn.chosen, *front[1:]]


def _png(path: str, drawn: Picture) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 9), height_ratios=(3, 2), layout="constrained")
    _scatter(above, drawn)
    _gantt(below, drawn)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _scatter(axes: Axes, drawn: Picture) -> None:
    for recompute, colour in RECOMPUTE_COLOURS.items():
        for fits in (True, False):
            group = [c for c in drawn.shown if c.layout.recompute == recompute and c.fits == fits]
            if group:
                axes.scatter(
                    [c.memory.total / 1e9 for c in group], [c.seconds for c in group], s=16, linewidths=0.8,
                    facecolors=colour if fits else "none", edgecolors=colour, alpha=0.8 if fits else 0.35,
                    label=f"recompute {recompute}" if fits else None,
                )  # fmt: skip
    front = drawn.front
    axes.plot(
        [c.memory.total / 1e9 for c in front], [c.seconds for c in front], color="black", lw=0.9, label="Pareto front"
    )
    axes.axvline(
        drawn.device_bytes / 1e9,
        color="firebrick",
        ls="--",
        lw=1,
        label=f"{drawn.device_bytes / 1e9:.0f} GB of the device",
    )
    chosen = drawn.chosen
    axes.scatter([chosen.memory.total / 1e9], [chosen.seconds], s=120, facecolors="none", edgecolors="black", lw=1.6)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    # Names stand above each other at the left, in the order of the front, with a line to their point.
    names = sorted(named(drawn), key=lambda c: c.seconds)
    for index, candidate in enumerate(names):
        height = (index + 0.5) / len(names) * 0.5 + 0.04
        axes.annotate(
            layout_label(candidate.layout), (candidate.memory.total / 1e9, candidate.seconds), xytext=(0.012, height),
            textcoords="axes fraction", fontsize=8, va="center",
            arrowprops={"arrowstyle": "-", "color": "grey", "lw": 0.5, "shrinkB": 3},
        )  # fmt: skip
    axes.set_ylim(low, high)
    axes.set_xlim(left=-0.28 * axes.get_xlim()[1])
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1]])
    axes.set_xlabel("memory of the fullest rank, GB (hollow: does not fit)")
    axes.set_ylabel("step time, s")
    axes.set_title(f"{drawn.title} on {drawn.plan.cluster}: {len(drawn.plan.fitting)} layouts fit", fontsize=11)
    axes.legend(fontsize=8, loc="upper right")


def _gantt(axes: Axes, drawn: Picture) -> None:
    from matplotlib.ticker import MaxNLocator

    for kind, colour in PASS_COLOURS.items():
        own = [p for p in drawn.passes if p.kind == kind]
        stages, lengths = [p.stage for p in own], [p.end_s - p.start_s for p in own]
        axes.barh(stages, lengths, left=[p.start_s for p in own], height=0.82, color=colour, edgecolor="white",
                  linewidth=0.3, label=kind)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, span(list(drawn.passes)))
    axes.set_xlabel("seconds")
    axes.set_ylabel("stage")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(timeline_title(drawn), fontsize=10)
    axes.legend(fontsize=8, loc="lower right")


def timeline_title(drawn: Picture) -> str:
    """What the timeline shows."""
    count = drawn.chosen.time.micro_batches
    whole = "" if drawn.complete else f", the first {len({p.micro_batch for p in drawn.passes})} shown"
    share = 100 * drawn.chosen.time.bubble_share
    return (
        f"predicted timeline of {layout_label(drawn.chosen.layout)}: {count} micro-batches{whole}, bubble {share:.1f} %"
    )
