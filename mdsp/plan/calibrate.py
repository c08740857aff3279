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
from mdsp.plan.layout import Layout, Workload, mdsp_software
from mdsp.plan.step_time import StepTime, step_time

LEFT_OVER = 0.05
"""Band after calibration, at least: repeats of one configuration differ by 2 to 8 %."""
FARTHEST = 50.0
"""Measured over predicted, or the reverse, at most."""


@dataclass(frozen=True)
class Efficiencies:
    """Constants to plan with, how far to trust them, and what to tell the user about where they come from."""

    constants: Constants
    band: float
    notes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """Devices of the runs that they were calibrated on."""

    def on(self, cluster: Cluster) -> Efficiencies:
        """The same, with a warning where the planned devices are not those of the calibration."""
        others = sorted({name for name in self.devices if name != cluster.device.name})
        if not others:
            return self
        note = f"warning: calibrated on {', '.join(others)}; what holds there may not hold on {cluster.device.name}"
        return replace(self, notes=(*self.notes, note))


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over predicted time, by what takes it."""

    compute: float
    link: float
    """Tensor-parallel communication."""
    network: float
    """Data-parallel communication."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured, and what was predicted for it."""

    name: str
    device: str
    step_s: float
    predicted_s: float
    factors: Factors


def calibrated(run_directories: Sequence[str]) -> Efficiencies:
    """The shipped constants, or those constants scaled to the measured runs in these directories.

    Raises ConfigError when a directory is no run or its run has not measured a step.
    """
    shipped = default_constants()
    if not run_directories:
        return Efficiencies(shipped.constants, shipped.band)
    runs = [measured_run(read_run(Path(directory)), shipped.constants) for directory in run_directories]
    mean = Factors(*(statistics.geometric_mean([getattr(r.factors, name) for r in runs]) for name in Factors.__slots__))
    notes = tuple(
        f"calibrated on {run.name}: step {run.step_s:.4g} s measured, {run.predicted_s:.4g} s predicted before; "
        f"computation x {run.factors.compute:.2f}, tensor-parallel communication x {run.factors.link:.2f}, "
        f"data-parallel x {run.factors.network:.2f}"
        for run in runs
    )
    spread = max(abs(math.log(run.factors.compute / mean.compute)) for run in runs)
    band = max(LEFT_OVER, 2 * spread) if len(runs) > 1 else max(LEFT_OVER, shipped.band / 2)
    return Efficiencies(scaled(shipped.constants, mean), band, notes, tuple(run.device for run in runs))


def scaled(constants: Constants, factors: Factors) -> Constants:
    """Constants with which each kind of work takes so many times as long."""
    return replace(
        constants,
        gemm_ampere=constants.gemm_ampere / factors.compute,
        gemm_hopper=constants.gemm_hopper / factors.compute,
        gemm_blackwell=constants.gemm_blackwell / factors.compute,
        hbm=constants.hbm / factors.compute,
        link=constants.link / factors.link,
        network=constants.network / factors.network,
    )


def measured_run(run: Run, constants: Constants) -> Measured:
    """The run's median step and its parts, beside the prediction of its own configuration.

    The parts come from its timelines; without one, everything is scaled alike. What the parts leave unexplained is
    shared by all of them, so that the calibrated prediction of the run is its measured step.
    """
    steps = [seconds for step, seconds in run.series("step_s") if step > 2] or [s for _, s in run.series("step_s")]
    if not steps:
        raise ConfigError(
            f"--calibrate {run.directory}: no step has been measured yet; calibrate on a run of a few steps"
        )
    step_s = statistics.median(steps)
    work, layout, cluster = described(run)
    predicted = step_time(work, layout, cluster, mdsp_software(work.precision), constants)
    factors = _factors(run, predicted, step_s)
    for _ in range(3):
        left = step_s / _seconds(work, layout, cluster, scaled(constants, factors))
        factors = Factors(*(_within(getattr(factors, name) * left) for name in Factors.__slots__))
    return Measured(run.name, cluster.device.name, step_s, predicted.total, factors)


def _seconds(work: Workload, layout: Layout, cluster: Cluster, constants: Constants) -> float:
    return step_time(work, layout, cluster, mdsp_software(work.precision), constants).total


def _factors(run: Run, predicted: StepTime, step_s: float) -> Factors:
    parts = [row["bubble_parts_s"] for row in run.steps if row.get("bubble_parts_s") and row["step"] > 1]
    whole = step_s / predicted.total
    if not parts:
        return Factors(whole, whole, whole)

    def ratio(name: str, seconds: float, otherwise: float) -> float:
        measured = statistics.median(float(part.get(name, 0.0)) for part in parts)
        return _within(measured / seconds) if measured > 0 and seconds > 0 else otherwise

    own = predicted.matrices + predicted.attention + predicted.elementwise + predicted.head + predicted.accumulate
    compute = ratio("compute", own, whole)
    link = ratio("tensor_parallel", predicted.tensor, compute)
    return Factors(compute, link, ratio("data_parallel", predicted.data, link))


def _within(factor: float) -> float:
    """Kept to a sane range: a single odd measurement must not make a part vanish, or everything."""
    return min(FARTHEST, max(1 / FARTHEST, factor))


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
