"""Fitting the constants on published runs: `python -m mdsp.plan.fit RUNS.jsonl [--write]`. A tool for mdsp's makers.

Least squares on the logarithm of step times, robust (Cauchy weights), each constant drawn to its prior, every source
weighted so that one with fifty rows does not decide for all. Also fits with each source left out in turn, and reports
the error on that source: what can be expected of a run from a paper that the fit has not seen.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mdsp.plan.constants import CONSTANTS_FILE, PRIORS, Constants, constants_from
from mdsp.plan.published import Run, published_run, read_rows, settle
from mdsp.plan.published_fields import Skip
from mdsp.plan.step_time import step_time

NOISE = 0.04
"""Relative noise of a published time; repeats of one configuration differ by 2 to 8 %."""
ROWS_PER_SOURCE = 25.0
"""A source of more rows counts like one of this many."""
STEP = 1e-3
"""Relative step of the numerical derivative."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants and the signed log errors of every run, in order."""

    constants: Constants
    errors: tuple[float, ...]


def seconds_of(constants: Constants) -> Callable[[Run], float]:
    """The predictor with these constants."""
    return lambda run: step_time(run.workload, run.layout, run.cluster, run.software, constants).total


def timed_runs(path: Path) -> list[Run]:
    """The runs of a file that have a measured time and can be predicted."""
    runs = []
    for row in read_rows(path):
        try:
            run = published_run(row)
        except Skip:
            continue
        if run.measured_s is not None:
            runs.append(run)
    return runs


def log_errors(runs: Sequence[Run], constants: Constants) -> np.ndarray:
    """log(predicted / measured) of runs whose open choices are settled."""
    predict = seconds_of(constants)
    return np.array([math.log(predict(run) / run.measured_s) for run in runs if run.measured_s is not None])


def settled(runs: Sequence[Run], constants: Constants) -> list[Run]:
    """The runs with their open choices made by the model with these constants."""
    predict = seconds_of(constants)
    return [settle(run, predict) for run in runs]


def fit(
    runs: Sequence[Run],
    iterations: int = 14,
    start: Constants | None = None,
    row_weights: Sequence[float] | None = None,
) -> Fit:
    """Constants for these runs: Levenberg-Marquardt in the logarithms of the constants, within their bounds."""
    names = list(PRIORS)
    centres = np.log([PRIORS[n].centre for n in names])
    widths = np.array([PRIORS[n].width for n in names])
    lows = np.log([max(PRIORS[n].low, 1e-6) for n in names])
    highs = np.log([PRIORS[n].high for n in names])
    theta = centres.copy() if start is None else np.log([getattr(start, n) for n in names])

    counts: dict[str, int] = {}
    for run in runs:
        counts[run.source] = counts.get(run.source, 0) + 1
    weights = np.array([math.sqrt(min(1.0, ROWS_PER_SOURCE / counts[run.source])) / NOISE for run in runs])
    if row_weights is not None:
        weights = weights * np.array(row_weights)

    def constants_at(point: np.ndarray) -> Constants:
        return constants_from(dict(zip(names, np.exp(point), strict=True)))

    def cost(errors: np.ndarray, point: np.ndarray) -> float:
        scaled = errors * weights
        return float(np.sum(2 * np.log1p(scaled**2 / 4)) + np.sum(((point - centres) / widths) ** 2))

    ready = settled(runs, constants_at(theta))
    damping = 1e-2
    errors = log_errors(ready, constants_at(theta))
    for iteration in range(iterations):
        if iteration in (3, 7):
            ready = settled(runs, constants_at(theta))
            errors = log_errors(ready, constants_at(theta))
        jacobian = np.empty((len(runs), len(names)))
        for column in range(len(names)):
            moved = theta.copy()
            moved[column] += STEP
            jacobian[:, column] = (log_errors(ready, constants_at(moved)) - errors) / STEP
        robust = weights / np.sqrt(1 + (errors * weights) ** 2 / 4)
        left = jacobian * robust[:, None]
        normal = left.T @ left + np.diag(1 / widths**2)
        gradient = left.T @ (errors * robust) + (theta - centres) / widths**2
        before = cost(errors, theta)
        for _ in range(6):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = np.clip(theta + step, lows, highs)
            trial_errors = log_errors(ready, constants_at(trial))
            if cost(trial_errors, trial) < before:
                damping = max(damping / 5, 1e-6)
                theta, errors = trial, trial_errors
                break
            damping *= 5
        if before - cost(errors, theta) < 1e-3 and iteration > 8:
            break
    constants = constants_at(theta)
    return Fit(constants, tuple(log_errors(settled(runs, constants), constants)))


@dataclass(frozen=True)
class Adapted:
    """Constants adapted to a few runs of one's own, and a common factor that remains (as a logarithm)."""

    constants: Constants
    offset: float


ADAPT_WIDTH = 0.15
"""How far (log standard deviation) a constant may differ on one machine and program from its value over all."""
OFFSET_WIDTH = 0.10
"""The same for the factor common to all runs of one machine and program."""


def adapt(runs: Sequence[Run], start: Constants) -> Adapted:
    """Constants near `start` for a few runs of one machine: one Gauss-Newton step at a time, with a common factor.

    The prior keeps what few runs cannot show at its value; the common factor takes what no constant explains.
    """
    names = list(PRIORS)
    centre = np.log([getattr(start, n) for n in names])
    lows = np.log([max(PRIORS[n].low, 1e-6) for n in names])
    highs = np.log([PRIORS[n].high for n in names])
    theta, offset = centre.copy(), 0.0
    precision = np.diag([1 / ADAPT_WIDTH**2] * len(names) + [1 / OFFSET_WIDTH**2])

    def at(point: np.ndarray) -> Constants:
        return constants_from(dict(zip(names, np.exp(point), strict=True)))

    for _ in range(4):
        errors = log_errors(runs, at(theta)) + offset
        jacobian = np.ones((len(runs), len(names) + 1))
        for column in range(len(names)):
            moved = theta.copy()
            moved[column] += STEP
            jacobian[:, column] = (log_errors(runs, at(moved)) + offset - errors) / STEP
        left = jacobian / NOISE
        gradient = left.T @ (errors / NOISE) + precision @ np.append(theta - centre, offset)
        step = np.linalg.solve(left.T @ left + precision, -gradient)
        theta = np.clip(theta + step[:-1], lows, highs)
        offset += float(step[-1])
    return Adapted(at(theta), offset)


def leave_one_source_out(runs: Sequence[Run], start: Constants) -> dict[str, list[float]]:
    """For each source, the log errors of its runs under constants fitted on all the others."""
    found: dict[str, list[float]] = {}
    for source in dict.fromkeys(run.source for run in runs):
        inside = [run for run in runs if run.source != source]
        outside = [run for run in runs if run.source == source]
        constants = fit(inside, start=start).constants
        found[source] = list(log_errors(settled(outside, constants), constants))
    return found


def relative(errors: Sequence[float]) -> np.ndarray:
    """|predicted / measured - 1| from log errors."""
    return np.abs(np.expm1(np.array(errors)))


def summary(errors: Sequence[float]) -> str:
    """Median, mean and 90th percentile of the relative error, in per cent."""
    off = 100 * relative(errors)
    middle, high = np.percentile(off, (50, 90))
    return f"n {len(off):3d}  median {middle:5.2f} %  mean {off.mean():5.2f} %  p90 {high:5.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mdsp.plan.fit", description=__doc__)
    parser.add_argument("runs", type=Path, help="published runs, one JSON object a line")
    parser.add_argument("--write", action="store_true", help="store the constants in mdsp/plan/constants.json")
    args = parser.parse_args()
    runs = [run for run in timed_runs(args.runs) if run.full_information]
    found = fit(runs)
    for name, prior in PRIORS.items():
        value = getattr(found.constants, name)
        print(f"{name:28s} {value:9.4g}   prior {prior.centre:g} (log width {prior.width:g})")
    print("in sample        ", summary(found.errors))
    outside = leave_one_source_out(runs, found.constants)
    for source in outside:
        inside = [e for run, e in zip(runs, found.errors, strict=True) if run.source == source]
        print(f"{source[:48]:48s}  in  {summary(inside)}")
        print(f"{'':48s}  out {summary(outside[source])}")
    every = [e for errors in outside.values() for e in errors]
    print("leave one source out", summary(every))
    if args.write:
        band = float(np.percentile(np.abs(every), 80))
        document = {
            "fitted_on": f"{len(runs)} published runs of {len(outside)} sources",
            "band": round(band, 4),
            "values": {name: float(f"{value:.4g}") for name, value in asdict(found.constants).items()},
        }
        CONSTANTS_FILE.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
