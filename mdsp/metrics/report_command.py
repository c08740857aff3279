"""`mdsp report RUN`: writes the page of a run, and on request its timelines as a Chrome trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mdsp.output_file import write_output


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="directory of the run (mdsp.monitor.dir)")
    parser.add_argument("-o", "--output", type=Path, help="HTML file to write (default: RUN/report.html)")
    parser.add_argument("--trace", type=Path, help="also write the timelines for Perfetto or chrome://tracing")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        metavar="STEP",
        help="sampled steps whose timelines are shown (default: the newest)",
    )


def main(args: argparse.Namespace) -> int:
    from mdsp.errors import ConfigError
    from mdsp.metrics.report import render_report, run_advice
    from mdsp.metrics.run import read_run
    from mdsp.metrics.trace import chrome_trace

    run = read_run(args.run)
    missing = [step for step in args.steps or () if step not in run.timelines]
    if missing:
        known = ", ".join(map(str, run.timelines)) or "none"
        raise ConfigError(f"--steps {missing[0]}: that step has no timeline; the sampled steps are {known}")
    output: Path = args.output or args.run / "report.html"
    write_output(output, render_report(run, args.steps))
    print(f"{output}: {len(run.steps)} steps, {len(run.timelines)} timelines")
    if args.trace is not None:
        chosen = {step: run.timelines[step] for step in args.steps or run.timelines}
        write_output(args.trace, json.dumps(chrome_trace(chosen)))
        print(f"{args.trace}: open it in ui.perfetto.dev or chrome://tracing")
    advice = run_advice(run)
    if advice is not None:
        print(f"advice: {advice.sentence}")
    return 0
