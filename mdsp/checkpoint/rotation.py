"""Which checkpoints a directory holds, which of them stay, and how the others are removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from mdsp.checkpoint.atomic import sync_directory
from mdsp.errors import CheckpointError

SAVING_PREFIX = ".saving-"
"""Begins the name of a directory in which a checkpoint is being written."""
TRASH_PREFIX = ".trash-"
"""Begins the name of a directory that is being removed."""
UNIVERSAL_SUFFIX = "_universal"
"""Ends the name of the layout-independent form of a checkpoint, kept beside it."""

_TAG = re.compile(r"global_step(0|[1-9]\d*)")


def tag_of(step: int) -> str:
    """Name of the directory of the checkpoint after `step` optimizer steps."""
    return f"global_step{step}"


def step_of(path: Path) -> int | None:
    """The step of a directory of such a name, None of any other."""
    match = _TAG.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints_in(directory: Path) -> list[Path]:
    """Directories that have the name of a checkpoint, newest first, complete or not."""
    if not directory.is_dir():
        return []
    found = [(step, path) for path in directory.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def remove_tree(directory: Path) -> None:
    """Remove a directory; it loses its name before it loses its files."""
    trash = directory.with_name(f"{TRASH_PREFIX}{directory.name}-{os.getpid()}")
    try:
        os.replace(directory, trash)
    except FileNotFoundError:
        return
    sync_directory(directory.parent)
    shutil.rmtree(trash, ignore_errors=True)


def publish_tree(temporary: Path, final: Path) -> None:
    """Give a finished directory its final name, in place of what had it before."""
    sync_directory(temporary)
    remove_tree(final)
    os.replace(temporary, final)
    sync_directory(final.parent)


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what killed runs left in the middle of saving or removing. No other run may be saving there."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if path.name.startswith((SAVING_PREFIX, TRASH_PREFIX))]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def superfluous(steps: Iterable[int], keep_last: int, keep_every: int) -> list[int]:
    """The steps of checkpoints that do not stay.

    Args:
        steps: steps of complete checkpoints.
        keep_last: how many of the newest stay; 0: all.
        keep_every: those at multiples of it stay too; 0: none for this reason.
    """
    ordered = sorted(steps)
    if keep_last == 0:
        return []
    return [step for step in ordered[:-keep_last] if not (keep_every and step % keep_every == 0)]


def superfluous_in(directory: Path, keep_last: int, keep_every: int, up_to: int | None = None) -> list[Path]:
    """Checkpoints of a directory that do not stay, oldest first.

    Only whole ones count as kept: with every file there and of its size, so that no damaged one takes the place of one
    that can be resumed. What is newer than the oldest of these and is not whole, has no manifest, or is a link, is left
    alone. With `up_to`, so is everything after that step: it is another run's.
    """
    from mdsp.checkpoint.layout import MANIFEST

    candidates: dict[int, Path] = {}
    whole = 0
    for path in checkpoints_in(directory):
        step = step_of(path)
        if step is None or (up_to is not None and step > up_to) or path.is_symlink() or not (path / MANIFEST).is_file():
            continue
        if whole < keep_last:
            if not is_whole(path):
                continue
            whole += 1
        candidates[step] = path
    return [candidates[step] for step in superfluous(candidates, keep_last, keep_every)]


def is_whole(path: Path) -> bool:
    """Whether a directory is a complete checkpoint with every file there and of its size; no byte is compared."""
    from mdsp.checkpoint.verify import open_any_manifest

    try:
        open_any_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True


def prune(directory: Path, keep_last: int, keep_every: int, up_to: int | None = None) -> list[Path]:
    """Remove `superfluous_in` the directory and their universal forms; returns what was removed."""
    removed = superfluous_in(directory, keep_last, keep_every, up_to)
    for path in removed:
        # The universal form first: it must not outlive what it was made from.
        remove_tree(path.with_name(path.name + UNIVERSAL_SUFFIX))
        remove_tree(path)
    return removed
