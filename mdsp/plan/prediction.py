"""Predicted next to measured: what a training run prints about its own step time."""

from __future__ import annotations

import statistics

from mdsp.config.run_config import RunConfig
from mdsp.plan.constants import default_constants
from mdsp.plan.explain import layout_of, software_of, workload_of
from mdsp.plan.hardware import run_cluster
from mdsp.plan.step_time import step_time

WARM_UP_STEPS = 2
"""First steps of a process, which also pay for allocation and compilation."""


class StepPrediction:
    """The predicted step time of a run on the devices that it found, and the measured ones beside it."""

    def __init__(self, run: RunConfig, device_name: str, peak_flops: float, devices_per_node: int) -> None:
        cluster = run_cluster(device_name, peak_flops, run.layout.world_size, devices_per_node)
        shipped = default_constants()
        self.step = step_time(workload_of(run), layout_of(run), cluster, software_of(run), shipped.constants)
        self.band = shipped.band
        self.known_device = cluster.device.architecture != "other"
        self._measured: list[float] = []

    def add(self, step_s: float) -> None:
        """One measured step."""
        self._measured.append(step_s)

    def before(self) -> str:
        """The line at the start."""
        sure = f"+-{100 * self.band:.0f} %" if self.known_device else "a guess, this device is not in the table"
        return f"predicted step {self.step.total:.3g} s ({sure}), bubble {100 * self.step.bubble_share:.1f} %"

    def after(self) -> str:
        """The line at the end; empty when no step was measured."""
        steps = self._measured[WARM_UP_STEPS:] or self._measured
        if not steps:
            return ""
        measured = statistics.median(steps)
        off = 100 * (self.step.total / measured - 1)
        return (
            f"measured step {measured:.3g} s (median of {len(steps)}), predicted {self.step.total:.3g} s "
            f"({off:+.0f} %); mdsp plan --calibrate takes the measured one into account"
        )
