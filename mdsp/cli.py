"""The `mdsp` command: one table of subcommands, and errors as one message.

A subcommand is a module with `configure(parser)` and `main(args) -> exit code`. Only the selected one is imported, so
that `mdsp --help` answers at once and no command pays for another's libraries.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import mdsp
from mdsp.errors import ConfigError, MdspError

COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": ("mdsp.data.prepare", "tokenise text into .bin/.idx files"),
    "config": ("mdsp.config.command", "check a configuration file, or explain its keys"),
    "plan": ("mdsp.plan.command", "find the fastest layout of a model on a cluster"),
    "convert": ("mdsp.checkpoint.convert_command", "between Hugging Face and sharded checkpoints, any degrees"),
    "checkpoint": ("mdsp.checkpoint.checkpoint_command", "list, verify and prune the checkpoints of a run"),
    "report": ("mdsp.metrics.report_command", "one HTML page about a run"),
    "compare": ("mdsp.metrics.compare_command", "several runs side by side"),
    "dashboard": ("mdsp.metrics.dashboard_command", "a W&B workspace with mdsp's panels"),
}
"""Command -> (module, one line of help)."""


def _is_installed(module: str) -> bool:
    """Whether a module of this package exists, found without importing its parents."""
    relative = Path(*module.split(".")[1:])
    root = Path(mdsp.__file__).parent
    return (root / relative).with_suffix(".py").is_file() or (root / relative / "__init__.py").is_file()


def available_commands() -> dict[str, tuple[str, str]]:
    """The commands whose modules are part of this installation."""
    return {name: entry for name, entry in COMMANDS.items() if _is_installed(entry[0])}


def build_parser(selected: str | None) -> argparse.ArgumentParser:
    """The parser of the whole command line, in which only the `selected` subcommand knows its own arguments."""
    parser = argparse.ArgumentParser(
        prog="mdsp",
        description="3D-parallel (tensor x pipeline x ZeRO-1 data) GPT training on DeepSpeed, from one JSON file.",
        epilog="Training itself is started by DeepSpeed's launcher: "
        "deepspeed --num_accelerators 8 --module mdsp.train --deepspeed_config FILE",
    )
    parser.add_argument("--version", action="version", version=f"mdsp {mdsp.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in available_commands().items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == selected:
            importlib.import_module(module).configure(subparser)
    return parser


def _run(argv: Sequence[str]) -> int:
    selected = next((word for word in argv if not word.startswith("-")), None)
    commands = available_commands()
    if selected is not None and selected not in commands:
        near = difflib.get_close_matches(selected, commands, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"there is no command '{selected}'{hint}; the commands are {', '.join(commands)}")
    args = build_parser(selected).parse_args(argv)
    code = importlib.import_module(commands[args.command][0]).main(args)
    assert isinstance(code, int)
    _flush()  # here, where a full disk or a reader that has left can still be told
    return code


def _flush() -> None:
    if sys.stdout is not None:  # None: it was closed from the start (`>&-`)
        sys.stdout.flush()


def _escape_what_does_not_fit() -> None:
    """A path with letters that the terminal's encoding lacks is shown with escapes, and is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """What standard output could not take: Python would complain of it again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own arguments); returns the exit code.

    What a user can cause ends as one message on standard error: `MdspError` with its own exit code, a file that cannot
    be opened, read or written with 1. Anything else is a defect of mdsp and keeps its traceback.
    """
    _escape_what_does_not_fit()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except MdspError as error:
        message, code = str(error), error.exit_code
    except BrokenPipeError:
        _discard_output()  # the reader of a pipe (`| head`) has left
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        message, code = f"{error.strerror or error}{where}", 1
        try:
            _flush()
        except OSError:
            _discard_output()
    except KeyboardInterrupt:
        message, code = "interrupted", 128 + signal.SIGINT
    print(f"mdsp: error: {message}", file=sys.stderr)
    return code
