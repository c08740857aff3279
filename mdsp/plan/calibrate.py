"""Calibration: efficiencies adjusted to what runs of one's own really took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdsp.errors import ConfigError
from mdsp.metrics.run import Run, read_run
from mdsp.model.config import ModelConfig
from mdsp.plan.constants import Constants, default_constants
from mdsp.plan.hardware import Cluster, run_cluster
from mdsp.plan.layout import MDSP, Layout, Workload
from mdsp.plan.step_time import StepTime, step_time

LEFT_OVER = 0.05
"""Band after calibration, at least: repeats of one configuration differ by 2 to 8 %."""


@dataclass(frozen=True)
class Efficiencies:
    """Constants to plan with, how far to trust them, and what to tell the user about where they come from."""

    constants: Constants
    band: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured, beside what was predicted for it before calibration."""

    name: str
    step_s: float
    predicted: StepTime
    compute_s: float | None
    """Mean over stages of the time in forward and backward of one step; None without a timeline."""
    predicted_compute_s: float

    @property
    def compute_factor(self) -> float:
        """Measured / predicted time of computation, from the timeline where there is one."""
        if self.compute_s is None:
            return self.step_s / self.predicted.total
        return self.compute_s / self.predicted_compute_s

    @property
    def rest_factor(self) -> float:
        """Measured / predicted time of what is not computation (communication between stages and ranks, optimizer)."""
        predicted = self.predicted.data + self.predicted.optimizer
        if self.compute_s is None or predicted <= 0:
            return self.compute_factor
        # The bubble and the imbalance scale with computation, so they are predicted again with its factor.
        stages = self.predicted.bubble + self.predicted.imbalance
        rest = self.step_s - self.compute_factor * (self.predicted_compute_s + stages)
        return min(10.0, max(0.1, rest / (self.predicted.total - self.predicted_compute_s - stages)))


def calibrated(run_directories: Sequence[str]) -> Efficiencies:
    """The shipped constants, or those constants scaled to the measured runs in these directories."""
    shipped = default_constants()
    if not run_directories:
        return Efficiencies(shipped.constants, shipped.band)
    runs = [measured_run(read_run(Path(directory)), shipped.constants) for directory in run_directories]
    compute = statistics.geometric_mean([run.compute_factor for run in runs])
    rest = statistics.geometric_mean([run.rest_factor for run in runs])
    notes = tuple(
        f"calibrated on {run.name}: step {run.step_s:.4g} s measured, {run.predicted.total:.4g} s predicted before; "
        f"computation x {run.compute_factor:.2f}, the rest x {run.rest_factor:.2f}"
        for run in runs
    )
    spread = max((abs(math.log(run.compute_factor / compute)) for run in runs), default=0.0)
    band = max(LEFT_OVER, min(shipped.band, 2 * spread) if len(runs) > 1 else shipped.band / 2)
    return Efficiencies(scaled(shipped.constants, compute, rest), band, notes)


def scaled(constants: Constants, compute: float, rest: float) -> Constants:
    """Constants with which computation takes `compute` times and communication `rest` times as long."""
    return replace(
        constants,
        gemm_ampere=constants.gemm_ampere / compute,
        gemm_hopper=constants.gemm_hopper / compute,
        gemm_blackwell=constants.gemm_blackwell / compute,
        hbm=constants.hbm / compute,
        link=constants.link / rest,
        network=constants.network / rest,
    )


def measured_run(run: Run, constants: Constants) -> Measured:
    """The run's median step, beside the prediction of its own configuration.

    Raises ConfigError when the run says too little.
    """
    steps = [seconds for step, seconds in run.series("step_s") if step > 2] or [s for _, s in run.series("step_s")]
    if not steps:
        raise ConfigError(
            f"--calibrate {run.directory}: no step has been measured yet; calibrate on a run of a few steps"
        )
    work, layout, cluster = described(run)
    predicted = step_time(work, layout, cluster, MDSP, constants)
    busy = [row["stage_busy_s"] for row in run.steps if row.get("stage_busy_s") and row["step"] > 1]
    compute = statistics.median(statistics.fmean(row) for row in busy) if busy else None
    stage_mean = statistics.fmean(predicted.stage_seconds) - predicted.pipeline / predicted.micro_batches
    return Measured(run.name, statistics.median(steps), predicted, compute, predicted.micro_batches * stage_mean)


def described(run: Run) -> tuple[Workload, Layout, Cluster]:
    """Workload, layout and devices that `run.json` describes."""
    info = run.info
    try:
        spread: dict[str, Any] = info["layout"]
        mdsp: dict[str, Any] = info["mdsp"]
        work = Workload(
            ModelConfig(**info["model"]), mdsp["data"]["seq_length"], spread["global_batch"], info["precision"]
        )
        layout = Layout(
            spread["tensor"], spread["pipeline"], spread["data"], spread["micro_batch"], mdsp["train"]["recompute"],
            mdsp["parallel"]["sequence_parallel"], blocks_per_stage=tuple(spread["blocks_per_stage"]),
        )  # fmt: skip
        cluster = run_cluster(info["peak_source"], info["peak_flops_per_s"], layout.devices)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--calibrate {run.directory}: its run.json does not describe the run ({error}); give a run of this version"
        ) from None
    return work, layout, cluster
