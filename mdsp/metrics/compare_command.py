"""`mdsp compare RUN RUN...`: a table in the terminal, and on request a page with overlaid curves."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdsp.output_file import write_output


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs")
    parser.add_argument("-o", "--output", type=Path, help="also write an HTML page with overlaid curves")


def main(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mdsp.errors import ConfigError
    from mdsp.metrics.compare import compare, render_comparison
    from mdsp.metrics.run import read_run

    if len(args.runs) < 2:
        raise ConfigError(f"one run ({args.runs[0]}) has nothing to be compared with; give two or more")
    runs = [read_run(directory) for directory in args.runs]
    found = compare(runs)
    table = Table()
    table.add_column("")
    for name in found.names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for title, cells in found.results:
        table.add_row(Text(title), *map(Text, cells))
    if found.differences:
        table.add_section()
        for key, cells in found.differences:
            table.add_row(Text(key, style="dim"), *map(Text, cells))
    Console().print(table)
    if args.output is not None:
        write_output(args.output, render_comparison(runs))
        print(f"{args.output}: overlaid curves")
    return 0
