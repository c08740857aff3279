"""`mdsp config check` and `mdsp config explain`."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mdsp config`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="check a file and print the layout and batch that follow from it")
    check.add_argument("file", metavar="FILE", help="the JSON configuration")
    check.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    check.add_argument("--json", action="store_true", help="print DeepSpeed's resolved keys and the layout as JSON")
    explain = actions.add_parser("explain", help="print keys with type, default and meaning")
    explain.add_argument("key", nargs="?", metavar="KEY", help="one key or section; all when left out")
    explain.add_argument("--markdown", action="store_true", help="print docs/configuration.md")


def main(args: argparse.Namespace) -> int:
    """Run `mdsp config`; returns the exit code. Raises ConfigError for what is wrong with the file."""
    return _check(args) if args.action == "check" else _explain(args)


def _explain(args: argparse.Namespace) -> int:
    from mdsp.config.explain import as_markdown, as_text, select

    print(as_markdown() if args.markdown else as_text(select(args.key)), end="" if args.markdown else "\n")
    return 0


def _check(args: argparse.Namespace) -> int:
    from mdsp.config.load import load_run_config
    from mdsp.config.summary import as_json, as_table

    run = load_run_config(args.file, args.set, args.world_size)
    print(as_json(run) if args.json else as_table(run))
    return 0
