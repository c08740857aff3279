"""Streams pieces of tensors into files: hashed, checked for NaN, converted, a few megabytes at a time."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from mdsp.checkpoint.atomic import write_at
from mdsp.checkpoint.pieces import CHUNK_BYTES, Pieces, raw_bytes
from mdsp.errors import CheckpointError

_ZEROS = bytes(CHUNK_BYTES)


def write_pieces(
    descriptor: int,
    offset: int,
    name: str,
    runs: Iterable[Pieces],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> str:
    """Write a tensor of `shape`: the runs one after the other, then zeros up to its size; returns its hash.

    The zeros (vocabulary padding) are hashed but not written: the file has a hole there. `progress` gets numbers of
    bytes as they are done.

    Raises:
        CheckpointError: a NaN in the tensor `name`, or a value that became infinite in the new type.
        OSError: the disk is full, or the like.
    """
    digest = xxhash.xxh3_128()
    end = offset + math.prod(shape) * dtype.itemsize
    for run in runs:
        converted = run.dtype != dtype
        for chunk in run.chunks(dtype):
            if chunk.numel() == 0:
                continue
            largest = chunk.max()  # a NaN anywhere makes the maximum a NaN, and this is the fastest pass there is
            if torch.isnan(largest):
                raise CheckpointError(f"tensor {name} contains NaN; such a model cannot be used, and is not converted")
            if converted and (torch.isinf(largest) or torch.isinf(chunk.min())):
                raise CheckpointError(f"tensor {name} has values that {dtype} cannot hold; choose a wider --dtype")
            data = raw_bytes(chunk)
            digest.update(data)
            write_at(descriptor, data, offset)
            offset += len(data)
            progress(len(data))
    while offset < end:
        step = min(end - offset, CHUNK_BYTES)
        digest.update(_ZEROS[:step])
        offset += step
        progress(step)
    return digest.hexdigest()


def hash_pieces(runs: Iterable[Pieces], dtype: torch.dtype) -> str:
    """The hash of a tensor that is the runs one after the other."""
    digest = xxhash.xxh3_128()
    for run in runs:
        for chunk in run.chunks(dtype):
            digest.update(raw_bytes(chunk))
    return digest.hexdigest()


class Syncer:
    """Makes written files durable without stopping for each: writing back begins at once, waiting comes at the end.

    One fsync per file while others are being written would commit the file system's journal each time.
    """

    def __init__(self) -> None:
        self._paths: dict[Path, None] = {}
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        """A file that has been written, or a part of it: let the system begin to write it to the disk."""
        with self._lock:
            self._paths[path] = None
        with _opened(path) as descriptor:
            _start_writeback(descriptor)

    def join(self) -> None:
        """Wait until all files are durable.

        Raises:
            OSError: one could not be written to the disk.
        """
        for path in self._paths:
            with _opened(path) as descriptor:
                os.fsync(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


_SYNC_FILE_RANGE_WRITE = 2


def _start_writeback(descriptor: int) -> None:
    """Linux's sync_file_range: begin to write dirty pages, wait for nothing. A hint: failure costs time only."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        function(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)
