"""The bubble of DeepSpeed's real engine beside its theory, with sleeps for the passes, one process a stage.

    python -m benchmarks.bubble --stages 8 --micro-batches 8 16 64 --forward 0.12

Passes that sleep need no core, so that 16 stages fit on two. What the engine itself does per micro-batch stays: pass
times must be long beside it (milliseconds, times the ranks per core).
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from mdsp.metrics.bubble import analyse_step
from tests.harness import run_ranks
from tests.metrics.sleeping_pipeline import Setting, length, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--forward", type=float, default=0.12, help="seconds; a backward pass takes twice as long")
    parser.add_argument("--slow-stage", type=int, default=-1, help="this stage takes 1.5 times as long")
    parser.add_argument("--delayed-sender", type=int, default=-1, help="this stage sends activations late")
    parser.add_argument("--delay", type=float, default=0.06, help="seconds")
    given = parser.parse_args()
    settings = [
        Setting(
            count,
            given.forward,
            2 * given.forward,
            given.slow_stage,
            given.delayed_sender,
            given.delay if given.delayed_sender >= 0 else 0.0,
        )
        for count in given.micro_batches
    ]
    timelines = run_ranks(measure, given.stages, settings, seconds=3600)[0]
    table = Table(title=f"{given.stages} stages, passes of {given.forward * 1e3:.0f} and {given.forward * 2e3:.0f} ms")
    for heading in (
        "micro-batches",
        "theory %",
        "measured %",
        "stages",
        "warm-up, drain",
        "imbalance",
        "waiting",
        "late %",
    ):
        table.add_column(heading, justify="right")
    for setting, timeline in zip(settings, timelines, strict=True):
        bubble = analyse_step(timeline)
        stages = [100 * stage.bubble for stage in bubble.stages]
        parts = (bubble.parts.warmup_drain, bubble.parts.imbalance, bubble.parts.waiting)
        table.add_row(
            str(setting.micro_batches),
            f"{100 * bubble.theory:.1f}",
            f"{100 * bubble.bubble:.1f}",
            f"{min(stages):.1f} .. {max(stages):.1f}",
            *(f"{100 * part / bubble.step_s:.1f}" for part in parts),
            f"{100 * (length(timeline) / setting.length(given.stages) - 1):.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
