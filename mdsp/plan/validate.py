"""Holds the planner against published runs: `python -m mdsp.plan.validate FILE.jsonl [--json OUT]`.

Every row is predicted or listed with the reason why not. Errors of step times and memory are printed per source and
over all; where a source measured several layouts of one model, also the regret: how much slower the layout that the
planner would have picked is than the best one measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsp.errors import MdspError
from mdsp.plan.constants import default_constants
from mdsp.plan.memory import ALLOCATOR_BYTES, PROCESS_BYTES, RankMemory, peak_memory
from mdsp.plan.published import Run, measured_seconds, published_run, read_rows, settle
from mdsp.plan.published_fields import Skip
from mdsp.plan.search import USABLE
from mdsp.plan.step_time import step_time

GIB = 2.0**30
CALIBRATION_RUNS = 5
CALIBRATION_DRAWS = 40


@dataclass(frozen=True)
class Row:
    """One published row and what the planner says about it."""

    id: str
    source: str
    run: Run | None
    predicted_s: float | None
    low_s: float | None
    high_s: float | None
    measured_s: float | None
    predicted_gb: float | None
    """In the unit of the tools that measured: 2**30 bytes."""
    measured_gb: float | None
    fits: bool | None
    skipped: str | None

    @property
    def time_error(self) -> float | None:
        """predicted / measured - 1 of the step time."""
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """predicted / measured - 1 of the memory."""
        if self.predicted_gb is None or self.measured_gb is None:
            return None
        return self.predicted_gb / self.measured_gb - 1

    def as_dict(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "id": self.id, "predicted_s": self.predicted_s, "low_s": self.low_s, "high_s": self.high_s,
            "measured_s": self.measured_s, "predicted_gb": self.predicted_gb, "measured_gb": self.measured_gb,
            "skipped": self.skipped,
        }  # fmt: skip


def predict_row(row: dict[str, Any]) -> Row:
    """The prediction for one row, with the shipped constants."""
    shipped = default_constants()
    name = str(row.get("id"))
    source = row.get("source")
    paper = str(source.get("paper")) if isinstance(source, dict) else "unknown source"
    try:
        run = settle(
            published_run(row),
            lambda r: step_time(r.workload, r.layout, r.cluster, r.software, shipped.constants).total,
        )
    except Skip as reason:
        measured = (
            measured_seconds(row)
            if all(isinstance(row.get(k), dict) for k in ("model", "hardware", "layout"))
            else None
        )
        return Row(name, paper, None, None, None, None, measured, None, None, None, str(reason))
    seconds = step_time(run.workload, run.layout, run.cluster, run.software, shipped.constants).total
    # Where the micro-batch is unknown, so are the activations of a pipeline: the time has a band, the memory has none.
    memory = None if run.open_micro_batch and run.layout.pipeline > 1 else _peak(run)
    gigabytes = None if memory is None else (memory.tensors + _overhead(run)) / GIB
    fits = None if memory is None else memory.total <= USABLE * run.cluster.device.memory_bytes
    band = shipped.band
    return Row(
        run.id, paper, run, seconds, seconds / (1 + band), seconds * (1 + band), run.measured_s, gigabytes,
        run.measured_gib, fits, None,
    )  # fmt: skip


def _peak(run: Run) -> RankMemory:
    return peak_memory(run.workload, run.layout, run.software)[1]


def _overhead(run: Run) -> float:
    """What the measuring tool counts beyond tensors."""
    if run.memory_kind == "analytic":
        return 0.0
    return ALLOCATOR_BYTES + (PROCESS_BYTES if run.memory_kind == "process" else 0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def error_line(errors: Iterable[float | None]) -> str:
    """`n median mean p90`, in per cent of the measured value."""
    off = [abs(100 * e) for e in errors if e is not None]
    if not off:
        return "  0"
    return f"{len(off):3d} {statistics.median(off):7.1f} {statistics.fmean(off):7.1f} {percentile(off, 0.9):7.1f}"


def sweeps(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows that differ in layout only: same source, model, devices and (nearly) global batch."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row.run is None or row.time_error is None:
            continue
        run = row.run
        model = run.workload.model
        key = (run.source, model.n_layers, model.hidden_size, model.n_heads, run.workload.seq_length, run.cluster,
               run.workload.precision, run.software, run.workload.global_batch // 64)  # fmt: skip
        groups.setdefault(key, []).append(row)
    return [group for group in groups.values() if len({_layout_key(row) for row in group}) > 1]


def _layout_key(row: Row) -> Any:
    assert row.run is not None
    return row.run.layout


def regret(group: Sequence[Row], seconds: Callable[[Run], float]) -> float:
    """How much slower the layout with the least predicted time is than the one with the least measured time.

    Times are per sequence; repeats of a layout count with their mean.
    """
    measured: dict[Any, list[float]] = {}
    predicted: dict[Any, float] = {}
    for row in group:
        assert row.run is not None and row.measured_s is not None
        batch = row.run.workload.global_batch
        measured.setdefault(row.run.layout, []).append(row.measured_s / batch)
        predicted[row.run.layout] = seconds(row.run) / batch
    means = {layout: statistics.fmean(times) for layout, times in measured.items()}
    return means[min(predicted, key=lambda layout: predicted[layout])] / min(means.values()) - 1


def random_regret(group: Sequence[Row]) -> float:
    """The regret of a random pick."""
    times = [row.measured_s / row.run.workload.global_batch for row in group if row.run and row.measured_s]
    return statistics.fmean(times) / min(times) - 1


def print_report(rows: Sequence[Row]) -> None:
    """Tables of errors, regret, out-of-memory agreement, and the rows that were not predicted."""
    sources = list(dict.fromkeys(row.source for row in rows))
    print(f"{'relative error of the step time, %':52s}   n  median    mean     p90")
    for source in sources:
        print(f"  {source[:50]:50s} {error_line(r.time_error for r in rows if r.source == source)}")
    full = [row for row in rows if row.run is not None and row.run.full_information]
    print(f"  {'all rows with full information':50s} {error_line(row.time_error for row in full)}")
    print(f"  {'all rows':50s} {error_line(row.time_error for row in rows)}")
    within = [row.low_s <= row.measured_s <= row.high_s for row in rows if row.low_s and row.high_s and row.measured_s]
    if within:
        band, share = 100 * default_constants().band, 100 * statistics.fmean(within)
        print(f"  within the printed band of +-{band:.0f} %: {share:.0f} % of {len(within)}")
    print(f"\n{'relative error of the memory, %':52s}   n  median    mean     p90")
    for kind, words in (
        ("allocator", "allocator peaks"),
        ("process", "nvidia-smi, cache included"),
        ("analytic", "analytic"),
    ):
        own = [row.memory_error for row in rows if row.run is not None and row.run.memory_kind == kind]
        print(f"  {words:50s} {error_line(own)}")
    _print_fit(rows)
    _print_regret(rows)
    skipped = [row for row in rows if row.skipped]
    print(f"\nnot predicted: {len(skipped)} of {len(rows)} rows")
    for row in skipped:
        print(f"  {row.id}: {row.skipped}")


def _print_fit(rows: Sequence[Row]) -> None:
    judged = [(row, row.run.out_of_memory) for row in rows if row.run is not None and row.fits is not None]
    known = [(row, oom) for row, oom in judged if oom or (row.run is not None and row.measured_s is not None)]
    if not known:
        return
    right = sum(row.fits is not oom for row, oom in known)
    ooms = [row for row, oom in known if oom]
    caught = sum(not row.fits for row in ooms)
    print(
        f"\nfits or not: {right} of {len(known)} right; of {len(ooms)} that did not fit, {caught} were predicted not to"
    )


def _print_regret(rows: Sequence[Row]) -> None:
    groups = sweeps(rows)
    if not groups:
        return
    print(f"\n{'regret of the chosen layout, %':52s} layouts  picked  random")
    constants = default_constants().constants
    shipped: list[float] = []
    for group in groups:
        first = group[0].run
        assert first is not None
        model = first.workload.model
        shape = f"{model.n_layers} x {model.hidden_size}, {model.n_heads} heads"
        name = f"{first.source[:16]}: {shape}, batch {first.workload.global_batch}"
        lost = regret(
            group, lambda run: step_time(run.workload, run.layout, run.cluster, run.software, constants).total
        )
        shipped.append(lost)
        count = len({_layout_key(row) for row in group})
        print(f"  {name:50s} {count:7d} {100 * lost:7.1f} {100 * random_regret(group):7.1f}")
    picked, chance = statistics.fmean(shipped), statistics.fmean(map(random_regret, groups))
    print(f"  {'mean of the sweeps':50s} {len(groups):7d} {100 * picked:7.1f} {100 * chance:7.1f}")
    _print_calibrated_regret(rows, groups)


def _print_calibrated_regret(rows: Sequence[Row], groups: Sequence[Sequence[Row]]) -> None:
    """Regret and error on a sweep after fitting the constants to five of its runs, over random choices of the five."""
    machines: dict[tuple[str, str, str], list[Sequence[Row]]] = {}
    for group in groups:
        machines.setdefault(_machine(group[0]), []).append(group)
    for machine, own in machines.items():
        source = machine[0]
        runs = [
            row.run for row in rows if row.run is not None and row.time_error is not None and _machine(row) == machine
        ]
        if len(runs) < 4 * CALIBRATION_RUNS:
            continue
        before, after, lost = calibrated_sweep(runs, own)
        print(
            f"  {source[:50]}, calibrated on {CALIBRATION_RUNS} of {len(runs)} runs ({CALIBRATION_DRAWS} draws): "
            f"regret mean {100 * lost:.1f} %, median error of the others {100 * after:.1f} % "
            f"(before {100 * before:.1f} %)"
        )


def _machine(row: Row) -> tuple[str, str, str]:
    """Source, device and program: what a calibration holds for."""
    assert row.run is not None
    return row.source, row.run.cluster.device.name, row.run.software.name


def calibrated_sweep(runs: Sequence[Run], groups: Sequence[Sequence[Row]]) -> tuple[float, float, float]:
    """(median error before, median error after, mean regret after) over draws of five calibration runs."""
    from mdsp.plan.fit import adapt, log_errors, relative, seconds_of

    generator = random.Random(0)
    constants = default_constants().constants
    errors: list[float] = []
    lost: list[float] = []
    for _ in range(CALIBRATION_DRAWS):
        chosen = generator.sample(range(len(runs)), CALIBRATION_RUNS)
        adapted = adapt([runs[i] for i in chosen], constants)
        rest = [run for i, run in enumerate(runs) if i not in chosen]
        errors += list(relative(list(log_errors(rest, adapted.constants) + adapted.offset)))
        lost += [regret(group, seconds_of(adapted.constants)) for group in groups]
    return (
        statistics.median(relative(list(log_errors(runs, constants)))),
        statistics.median(errors),
        statistics.fmean(lost),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mdsp.plan.validate", description="Predict published runs.")
    parser.add_argument("file", type=Path, metavar="FILE", help="published runs, one JSON object a line")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every row's prediction")
    args = parser.parse_args(argv)
    try:
        rows = [predict_row(row) for row in read_rows(args.file)]
    except MdspError as error:
        print(f"mdsp: error: {error}", file=sys.stderr)
        return error.exit_code
    print_report(rows)
    if args.json:
        args.json.write_text(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
