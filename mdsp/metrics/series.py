"""Names, units and order of every series that a run reports, for the monitor, the dashboard and the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mdsp.metrics.bubble import PART_NAMES


@dataclass(frozen=True, slots=True)
class Series:
    """One number over steps."""

    key: str
    """Name in the monitor, `section/name_unit`."""
    title: str
    unit: str
    field: str
    """Key in a row of `metrics.jsonl`."""
    scale: float = 1.0
    """Factor from the row's unit to this one."""


PART_TITLES: dict[str, str] = {
    "compute": "compute",
    "tensor_parallel": "tensor-parallel communication",
    "warmup_drain": "warm-up and drain",
    "imbalance": "imbalance between stages",
    "waiting": "waiting for a neighbour",
    "data_parallel": "data-parallel reduction",
    "optimizer": "optimizer",
    "data": "data",
    "checkpoint": "checkpoint",
    "other": "other",
}
"""In words, in the order in which they are shown."""

SERIES: tuple[Series, ...] = (
    Series("train/loss", "Loss", "", "loss"),
    Series("train/learning_rate", "Learning rate", "", "lr"),
    Series("train/grad_norm", "Gradient norm before clipping", "", "grad_norm"),
    Series("train/loss_scale", "Loss scale", "", "loss_scale"),
    Series("train/skipped_steps", "Skipped steps", "", "skipped"),
    Series("train/step", "Optimizer step", "", "step"),
    Series("train/tokens", "Tokens trained on", "", "tokens"),
    Series("eval/loss", "Loss on held-out text", "", "eval_loss"),
    Series("eval/perplexity", "Perplexity on held-out text", "", "eval_perplexity"),
    Series("speed/tokens_per_s", "Tokens per second", "tokens/s", "tokens_per_s"),
    Series("speed/samples_per_s", "Samples per second", "samples/s", "samples_per_s"),
    Series("speed/step_s", "Step time", "s", "step_s"),
    Series("speed/data_wait_s", "Waiting for data", "s", "data_s"),
    Series("speed/checkpoint_stall_s", "Held up by saving a checkpoint", "s", "checkpoint_s"),
    Series("speed/model_tflops_causal_half", "Model TFLOP/s per device", "TFLOP/s", "model_tflops_per_device"),
    Series(
        "speed/hardware_tflops_causal_half",
        "Hardware TFLOP/s per device",
        "TFLOP/s",
        "hardware_tflops_per_device",
    ),
    Series("speed/mfu_percent", "Model FLOPs utilisation", "%", "mfu", 100),
    Series("speed/hfu_percent", "Hardware FLOPs utilisation", "%", "hfu", 100),
    Series("bubble/measured_percent", "Pipeline bubble, measured", "%", "bubble_measured", 100),
    Series("bubble/theory_percent", "Pipeline bubble, theory of the schedule", "%", "bubble_theory", 100),
    *(
        Series(f"bubble_parts/{name}_s", PART_TITLES[name].capitalize(), "s", f"bubble_parts_s.{name}")
        for name in PART_NAMES
    ),
)
"""One number per step each. Series of every stage are made from `STAGE_SERIES`."""

STAGE_SERIES: tuple[Series, ...] = (
    Series("stage_busy/stage_{stage:02d}_s", "Busy time of stage {stage}", "s", "stage_busy_s"),
    Series("stage_bubble/stage_{stage:02d}_percent", "Bubble of stage {stage}", "%", "stage_bubble", 100),
    Series("memory/stage_{stage:02d}_gb", "Peak memory of stage {stage}", "GB", "memory_bytes", 1e-9),
)
"""One number per step and stage each."""


def values(row: dict[str, Any]) -> dict[str, float]:
    """Monitor key -> value, for everything that one row of `metrics.jsonl` has; never a number that is not finite."""
    row = dict(row)
    for name, seconds in (row.get("bubble_parts_s") or {}).items():
        row[f"bubble_parts_s.{name}"] = seconds
    if row.get("eval_loss") is not None and row["eval_loss"] < 700:  # exp overflows beyond
        row["eval_perplexity"] = math.exp(row["eval_loss"])
    found = {series.key: row[series.field] * series.scale for series in SERIES if row.get(series.field) is not None}
    for series in STAGE_SERIES:
        for stage, value in enumerate(row.get(series.field) or ()):
            found[series.key.format(stage=stage)] = value * series.scale
    found.update({f"extra/{name}": value for name, value in (row.get("extra") or {}).items()})
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}
