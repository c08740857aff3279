"""Whether a checkpoint is whole: manifest, files, sizes, and every byte against its hash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mdsp.checkpoint.hashing import file_hash
from mdsp.checkpoint.layout import MANIFEST
from mdsp.checkpoint.manifest import Manifest, StoredFile, parse_manifest, stored_path
from mdsp.errors import CheckpointError


def open_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint of training; as `open_any_manifest`, and CheckpointError when it is converted."""
    manifest = open_any_manifest(directory)
    if manifest.training is None:
        raise CheckpointError(
            f"{directory} is a converted checkpoint: weights without optimizer state. Start from it with "
            f'"mdsp.model": {{"from_hf": ...}} after `mdsp convert to-hf`, or resume a checkpoint of training'
        )
    return manifest


def open_any_manifest(directory: Path) -> Manifest:
    """The manifest in just this directory, with every file that it names there and of the right size.

    Raises:
        CheckpointError: the checkpoint is unfinished, damaged or hostile.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {MANIFEST}: it was never finished")
    try:
        manifest = parse_manifest(path.read_bytes(), str(path))
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply; it is no manifest") from None
    check_files(directory, all_files(manifest))
    layers = {entry.file for entry in manifest.tensors}
    unlisted = layers - {file.file for file in manifest.files}
    if manifest.training is not None and unlisted:
        raise CheckpointError(f"{path} lists no hash for {min(unlisted)}; the checkpoint is damaged")
    for name in unlisted:  # a converted checkpoint has hashes of its tensors instead
        stored_path(directory, name)
    return manifest


def all_files(manifest: Manifest) -> tuple[StoredFile, ...]:
    """Every file that a manifest has a hash of as a whole; of a checkpoint of training, every file."""
    return (*manifest.files, *manifest.hf_files)


def check_files(directory: Path, files: tuple[StoredFile, ...]) -> None:
    """CheckpointError for the first file that is missing, leads elsewhere, or has another size."""
    for file in files:
        size = stored_path(directory, file.file).stat().st_size
        if size != file.size:
            raise CheckpointError(
                f"{directory / file.file} has {size} bytes instead of {file.size}; the checkpoint is damaged"
            )


def damaged_file(
    directory: Path, files: tuple[StoredFile, ...], progress: Callable[[StoredFile], None] | None = None
) -> str | None:
    """What is wrong with the first of these files whose bytes have changed; None when all is well."""
    for file in files:
        try:
            if file_hash(directory / file.file) != file.hash:
                return f"{directory / file.file} is damaged: its bytes are not those that were written"
        except OSError as error:
            return f"{directory / file.file} cannot be read: {error.strerror}"
        if progress is not None:
            progress(file)
    return None
