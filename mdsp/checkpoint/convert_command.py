"""`mdsp convert`: from-hf, to-hf, reshape, check, show."""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mdsp.checkpoint.sizes import byte_size, bytes_in_words
from mdsp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress as RichProgress

    from mdsp.checkpoint.conversion import Summary

_SHOWN_DIFFERENCES = 20


def _path(text: str) -> Path:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8, and torch opens no other path; rename it") from None
    return Path(text)


def _degree(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a degree; give a whole number from 1 on")
    return int(text)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="convert_command", metavar="ACTION", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")

    def degrees(command: argparse.ArgumentParser) -> None:
        command.add_argument("--tensor", type=_degree, default=1, help="tensor-parallel degree (default 1)")
        command.add_argument("--pipeline", type=_degree, default=1, help="pipeline-parallel degree (default 1)")

    def common(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--dtype",
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="type of the weights' elements; auto keeps that of each tensor. Optimizer state keeps its own",
        )
        command.add_argument("--threads", type=_degree, default=None, help="threads (default: one per core, 2 to 8)")
        command.add_argument("--quiet", action="store_true", help="no progress bar")

    from_hf = add("from-hf", "a Hugging Face directory to a sharded checkpoint")
    from_hf.add_argument("hf_dir", type=_path, metavar="HF_DIR", help="directory with config.json and weights")
    from_hf.add_argument("out", type=_path, metavar="OUT", help="directory to make")
    degrees(from_hf)
    common(from_hf)
    to_hf = add("to-hf", "a sharded checkpoint, converted or from training, to a Hugging Face directory")
    to_hf.add_argument("checkpoint", type=_path, metavar="CKPT", help="checkpoint, or one tag of it")
    to_hf.add_argument("out", type=_path, metavar="OUT", help="directory to make")
    to_hf.add_argument(
        "--max-shard-size", type=byte_size, default=byte_size("5GB"), help="largest safetensors file (default 5GB)"
    )
    common(to_hf)
    reshape = add(
        "reshape",
        "a sharded checkpoint to one of other degrees; one of training with its optimizer state, so that training "
        "resumes from it at any layout",
    )
    reshape.add_argument("checkpoint", type=_path, metavar="CKPT", help="checkpoint, or one tag of it")
    reshape.add_argument("out", type=_path, metavar="OUT", help="directory to make")
    degrees(reshape)
    reshape.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer state of a checkpoint of training behind"
    )
    common(reshape)
    check = add("check", "compare two checkpoints of any kind, tensor by tensor; exit code 1 when they differ")
    check.add_argument("a", type=_path, metavar="A")
    check.add_argument("b", type=_path, metavar="B")
    check.add_argument(
        "--logits", action="store_true", help="also run both in float32 and find the first layer that differs"
    )
    show = add("show", "what a directory is: family, sizes, degrees, tensors, types, tokenizer, complete or not")
    show.add_argument("path", type=_path, metavar="X")


def main(args: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "from-hf": _from_hf,
        "to-hf": _to_hf,
        "reshape": _reshape,
        "check": _check,
        "show": _show,
    }
    # The interpreter's last search for garbage goes through all of torch's modules, a tenth of a short conversion.
    atexit.register(gc.freeze)
    return actions[args.convert_command](args)


class _Bar:
    """A progress bar on standard error with bytes, bytes per second and the time left."""

    def __init__(self, label: str, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.rich: RichProgress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=quiet or not sys.stderr.isatty(),
        )
        self._task = self.rich.add_task(label, total=None)

    def start(self, total_bytes: int) -> None:
        """Set the total."""
        self.rich.update(self._task, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        """More bytes are done."""
        self.rich.update(self._task, advance=done_bytes)


def _dtype(name: str) -> torch.dtype | None:
    from mdsp.checkpoint.weights import DTYPES

    return None if name == "auto" else DTYPES[name]


def _run(args: argparse.Namespace, label: str, work: Callable[[_Bar], Summary]) -> int:
    """Run a conversion under a progress bar and print its summary."""
    begun = time.perf_counter()
    bar = _Bar(label, args.quiet)
    try:
        with bar.rich:
            summary = work(bar)
    except OSError as error:
        raise CheckpointError(f"{error.filename or args.out}: {error.strerror or error}{_way_on(args.out)}") from None
    except KeyboardInterrupt:
        print(f"interrupted{_way_on(args.out)}", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - begun
    if summary.complete_before:
        print(
            f"{summary.out}: is complete already, {summary.parameters} parameter tensors, compared in {seconds:.1f} s"
        )
        return 0
    size = bytes_in_words(summary.written_bytes)
    print(f"{summary.out}: {summary.parameters} parameter tensors, {size} in {seconds:.1f} s")
    print(f"verified: {summary.verified}")
    if summary.resumed_parts:
        print(f"continued: {summary.resumed_parts} of {summary.parts} parts were finished before, hashes compared")
    if summary.left_aside:
        print(f"left aside: {len(summary.left_aside)} tensors that are no parameters ({summary.left_aside[0]}, ...)")
    if summary.optimizer_state:
        print(f"optimizer state: {summary.optimizer_state}")
    print(f"carried: {', '.join(summary.carried) or 'no tokenizer files'}")
    return 0


def _way_on(out: Path) -> str:
    """What a message about an interruption ends with."""
    from mdsp.checkpoint.partial import JOURNAL, partial_path

    try:
        begun = (partial_path(out) / JOURNAL).exists()
    except OSError:
        begun = False
    if not begun:
        return "; nothing was written"
    return f"; what is finished is kept in {partial_path(out)}, run the same command again to continue"


def _from_hf(args: argparse.Namespace) -> int:
    from mdsp.checkpoint.convert import from_hf

    dtype = _dtype(args.dtype)
    return _run(
        args,
        "from-hf",
        lambda bar: from_hf(args.hf_dir, args.out, args.tensor, args.pipeline, dtype, bar, args.threads),
    )


def _to_hf(args: argparse.Namespace) -> int:
    from mdsp.checkpoint.convert import to_hf

    dtype = _dtype(args.dtype)
    return _run(
        args, "to-hf", lambda bar: to_hf(args.checkpoint, args.out, args.max_shard_size, dtype, bar, args.threads)
    )


def _reshape(args: argparse.Namespace) -> int:
    from mdsp.checkpoint.convert import reshape

    dtype = _dtype(args.dtype)
    return _run(
        args,
        "reshape",
        lambda bar: reshape(
            args.checkpoint, args.out, args.tensor, args.pipeline, dtype, bar, args.threads, args.weights_only
        ),
    )


@contextmanager
def _reading() -> Iterator[None]:
    """What cannot be read is an error of its own: for `check`, exit code 1 says that the two differ."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise CheckpointError(f"{where}{error.strerror or error}") from None


def _check(args: argparse.Namespace) -> int:
    from mdsp.checkpoint.check import LOGITS_TOLERANCE, compare, compare_activations
    from mdsp.checkpoint.optimizer_check import compare_optimizer_states

    with _reading():
        result = compare(args.a, args.b)
        states = compare_optimizer_states(args.a, args.b)
    differences = result.differences + (() if isinstance(states, str) else states.differences)
    for line in differences[:_SHOWN_DIFFERENCES]:
        print(f"differs: {line}")
    if len(differences) > _SHOWN_DIFFERENCES:
        print(f"... and {len(differences) - _SHOWN_DIFFERENCES} more differences")
    if not result.differences:
        print(f"the same: {result.parameters} parameter tensors, equal by hash")
    if isinstance(states, str):
        print(f"optimizer state: {states}")
    elif not states.differences:
        print(f"optimizer state: the same, {states.parameters} tensors")
    code = 1 if differences else 0
    if args.logits:
        with _reading():
            layers = compare_activations(args.a, args.b)
        first = next((layer for layer in layers if not layer.relative <= LOGITS_TOLERANCE), None)
        worst = max(layers, key=lambda layer: layer.relative)
        if first is None:
            print(
                f"activations agree in all {len(layers)} places; largest difference {worst.relative:.1e} ({worst.name})"
            )
        else:
            print(f"activations differ first after: {first.name} (relative difference {first.relative:.1e})")
            code = 1
    return code


def _show(args: argparse.Namespace) -> int:
    from mdsp.checkpoint.partial import refuse_partial
    from mdsp.checkpoint.show import describe

    with _reading():
        if not args.path.exists():
            refuse_partial(args.path)  # perhaps its conversion was only begun
        if not args.path.is_dir():
            raise ConfigError(f"{args.path} is not a directory")
        values = describe(args.path)
    width = max(len(word) for word in values)
    for word, value in values.items():
        print(f"{word:<{width}}  {value}")
    return 0
