"""`mdsp checkpoint list|verify|prune DIR`: what a run's directory holds, whether it is whole, and making room."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
from dataclasses import dataclass
from pathlib import Path

from mdsp.checkpoint.layout import MANIFEST
from mdsp.checkpoint.manifest import Manifest
from mdsp.checkpoint.rotation import (
    SAVING_PREFIX,
    TRASH_PREFIX,
    checkpoints_in,
    prune,
    remove_leftovers,
    step_of,
    superfluous_in,
)
from mdsp.checkpoint.sizes import bytes_in_words
from mdsp.checkpoint.verify import open_any_manifest
from mdsp.errors import CheckpointError, ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the checkpoints of a directory")
    listing.add_argument("directory", type=Path, metavar="DIR", help="mdsp.checkpoint.dir of a run")
    verify = actions.add_parser("verify", help="every byte of one checkpoint, or of all in a directory")
    verify.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint, or mdsp.checkpoint.dir of a run")
    pruning = actions.add_parser("prune", help="remove old checkpoints")
    pruning.add_argument("directory", type=Path, metavar="DIR", help="mdsp.checkpoint.dir of a run")
    pruning.add_argument("--keep-last", type=int, required=True, metavar="K", help="the K newest complete ones stay")
    pruning.add_argument(
        "--keep-every", type=int, default=0, metavar="M", help="those at multiples of M steps stay too"
    )
    pruning.add_argument("--leftovers", action="store_true", help="what killed runs left half written goes too")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def main(args: argparse.Namespace) -> int:
    """0; verify: 2 when something is damaged."""
    directory: Path = args.directory
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give mdsp.checkpoint.dir of a run")
    if args.action == "list":
        return _list(directory)
    if args.action == "verify":
        return _verify(directory)
    return _prune(directory, args.keep_last, args.keep_every, args.leftovers, args.dry_run)


@dataclass(frozen=True)
class _Entry:
    path: Path
    manifest: Manifest | None
    problem: str


def _entries(directory: Path) -> list[_Entry]:
    found = []
    for path in checkpoints_in(directory):
        try:
            found.append(_Entry(path, open_any_manifest(path), ""))
        except (CheckpointError, OSError) as error:
            found.append(_Entry(path, None, str(error)))
    return found


def _size(path: Path) -> str:
    return bytes_in_words(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def _list(directory: Path) -> int:
    rows = [("step", "layout", "precision", "samples", "tokens", "size", "written", "state")]
    for entry in _entries(directory):
        written = datetime.datetime.fromtimestamp(entry.path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        step, size = str(step_of(entry.path)), _size(entry.path)
        if entry.manifest is None:
            rows.append((step, "-", "-", "-", "-", size, written, entry.problem))
            continue
        manifest, state = entry.manifest, entry.manifest.training
        layout = f"TP{manifest.tensor} PP{manifest.pipeline}"
        samples, tokens = str(manifest.counters.samples), str(manifest.counters.tokens)
        if state is None:
            rows.append((step, layout, "-", samples, tokens, size, written, "complete, weights only"))
        elif state.optimizer_form == "universal":
            rows.append((step, layout, state.precision, samples, tokens, size, written, "complete, for any layout"))
        else:
            layout += f" DP{state.data}"
            rows.append((step, layout, state.precision, samples, tokens, size, written, "complete"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        # Not a wrapped table: the state holds a path that somebody wants to copy.
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    leftovers = [path for path in directory.iterdir() if path.name.startswith((SAVING_PREFIX, TRASH_PREFIX))]
    for path in leftovers:
        print(f"half written: {path} ({_size(path)}); `mdsp checkpoint prune --leftovers` removes it")
    return 0


def _verify(directory: Path) -> int:
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed announces the accelerator that it has not found
        from mdsp.checkpoint.engine_io import read_file
    from mdsp.checkpoint.conversion import Silent
    from mdsp.checkpoint.jobs import default_threads
    from mdsp.checkpoint.weights import ShardedWeights
    from mdsp.checkpoint.whole import damage_of

    paths = [directory] if (directory / MANIFEST).exists() else checkpoints_in(directory)
    if not paths:
        raise CheckpointError(f"{directory} holds no checkpoints; give a checkpoint or mdsp.checkpoint.dir of a run")
    damaged = 0
    for path in paths:
        try:
            manifest = open_any_manifest(path)
            problem = damage_of(ShardedWeights(path), Silent(), default_threads())
            if problem is None:
                for file in manifest.files:
                    read_file(path / file.file, mmap=True)  # whole files can still hold code
        except (CheckpointError, OSError) as error:
            problem = str(error)
        damaged += problem is not None
        print(f"{path}: {'whole' if problem is None else problem}")
    return 2 if damaged else 0


def _prune(directory: Path, keep_last: int, keep_every: int, leftovers: bool, dry_run: bool) -> int:
    if keep_last < 1 or keep_every < 0:
        raise ConfigError(
            f"--keep-last {keep_last} --keep-every {keep_every}: at least one checkpoint must stay (--keep-last 1 or "
            f"more), and --keep-every is a number of steps, or 0"
        )
    verb = "would remove" if dry_run else "removed"
    removed = (superfluous_in if dry_run else prune)(directory, keep_last, keep_every)
    if leftovers:
        half = [path for path in directory.iterdir() if path.name.startswith((SAVING_PREFIX, TRASH_PREFIX))]
        removed += half if dry_run else remove_leftovers(directory)
    for path in removed:
        print(f"{verb} {path}")
    print(f"{verb} {len(removed)} in all")
    return 0
