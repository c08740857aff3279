"""The W&B workspace of mdsp runs: which panels, in which order. The definition is plain data and needs no W&B."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mdsp.metrics.bubble import PART_NAMES
from mdsp.metrics.series import SERIES

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

X_AXIS = "train/step"
"""W&B's own step counts samples (see `monitor.py`); charts are drawn over optimizer steps."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: the series `metrics`, or every series that matches `metric_regex`."""

    title: str
    metrics: tuple[str, ...] = ()
    metric_regex: str | None = None
    stacked: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = True


def sections() -> tuple[Section, ...]:
    """What a person looks at first stands first: is it learning, is it fast, where does the time go."""
    titles = {series.key: series for series in SERIES}
    parts = tuple(f"bubble_parts/{name}_s" for name in PART_NAMES)

    def panel(*keys: str, title: str | None = None) -> Panel:
        first = titles[keys[0]]
        return Panel(title or first.title, keys, unit=first.unit)

    return (
        Section(
            "Learning",
            (
                panel("train/loss", "eval/loss", title="Loss, training and held out"),
                panel("eval/perplexity"),
                panel("train/grad_norm"),
                panel("train/learning_rate"),
            ),
        ),
        Section(
            "Speed",
            (
                panel(
                    "speed/model_tflops_causal_half", "speed/hardware_tflops_causal_half", title="TFLOP/s per device"
                ),
                panel("speed/mfu_percent"),
                panel("speed/tokens_per_s"),
                panel("speed/step_s"),
            ),
        ),
        Section(
            "Pipeline bubble",
            (
                panel("bubble/measured_percent", "bubble/theory_percent", title="Bubble, measured and in theory"),
                Panel("Where the step goes", parts, stacked=True, unit="s"),
                Panel("Bubble per stage", metric_regex="stage_bubble/.*", unit="%"),
                Panel("Busy time per stage", metric_regex="stage_busy/.*", unit="s"),
            ),
        ),
        Section("Memory", (Panel("Peak memory per stage", metric_regex="memory/.*", unit="GB"),)),
        Section(
            "Health",
            (
                panel("train/skipped_steps"),
                panel("train/loss_scale"),
                panel("speed/data_wait_s"),
                panel("speed/checkpoint_stall_s"),
                panel("train/tokens"),
            ),
            is_open=False,
        ),
    )


def definition(name: str, entity: str, project: str) -> dict[str, Any]:
    """The workspace as plain data."""
    return dict(name=name, entity=entity, project=project, x=X_AXIS, sections=[asdict(s) for s in sections()])


def workspace(name: str, entity: str, project: str) -> Workspace:
    """The workspace as an object of `wandb_workspaces`, not yet saved."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def plot(panel: Panel) -> reports.LinePlot:
        return reports.LinePlot(
            title=panel.title,
            x=reports.Metric(X_AXIS),
            y=[reports.Metric(key) for key in panel.metrics],
            metric_regex=panel.metric_regex,
            plot_type="stacked-area" if panel.stacked else "line",
            title_x="step",
            title_y=panel.unit or None,
        )

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(name=s.title, panels=[plot(p) for p in s.panels], is_open=s.is_open) for s in sections()
        ],
    )
