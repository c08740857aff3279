"""Streams pieces of tensors into files: hashed, checked for NaN, converted, a few megabytes at a time."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from mdsp.checkpoint.atomic import write_at
from mdsp.checkpoint.pieces import CHUNK_BYTES, Pieces, raw_bytes
from mdsp.errors import CheckpointError

WRITEBACK_BYTES = 8 * 2**20
"""After so many bytes of a tensor the system is asked to begin writing them to the disk."""

_ZEROS = bytes(CHUNK_BYTES)
_INFINITY = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
}
"""The bits of infinity; NaNs are above them when bits are taken for integers and the sign is left out."""
_INTEGERS = {8: np.int64, 4: np.int32, 2: np.int16}
_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16}


def write_pieces(
    descriptor: int,
    offset: int,
    name: str,
    runs: Iterable[Pieces],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    progress: Callable[[int], None],
    lock: AbstractContextManager[object] | None = None,
    see: Callable[[Tensor], None] | None = None,
) -> str:
    """Write a tensor of `shape`: the runs one after the other, then zeros up to its size; returns its hash.

    The zeros (vocabulary padding) are hashed but not written: the file has a hole there. `progress` gets numbers of
    bytes as they are done. `lock` is held while the file is written to, where other threads write into it too: the
    system lets in one at a time, and those that wait for it spin on their cores. `see` gets what is about to be read.

    Raises:
        CheckpointError: a NaN in the tensor `name`, or a value that became infinite in the new type.
        OSError: the disk is full, or the like.
    """
    lock = lock or nullcontext()
    digest = xxhash.xxh3_128()
    end = offset + math.prod(shape) * dtype.itemsize
    begun = offset  # up to here, bytes are on their way to the disk

    def hand_over() -> None:
        nonlocal begun
        if offset > begun:
            _start_writeback(descriptor, begun, offset - begun)
            progress(offset - begun)
            begun = offset

    for run in runs:
        converted = run.dtype != dtype
        for chunk in run.chunks(dtype, see):
            if chunk.numel() == 0:
                continue
            _refuse_unusable(name, chunk, converted)
            data = raw_bytes(chunk)
            digest.update(data)
            with lock:
                write_at(descriptor, data, offset)
            offset += len(data)
            if offset - begun >= WRITEBACK_BYTES:
                hand_over()
    hand_over()
    while offset < end:
        step = min(end - offset, CHUNK_BYTES)
        digest.update(_ZEROS[:step])
        offset += step
        progress(step)
    return digest.hexdigest()


def _refuse_unusable(name: str, chunk: Tensor, converted: bool) -> None:
    """Refuse NaN and, in converted numbers, infinity.

    Two passes over integers find the largest magnitude several times as fast as torch finds the maximum of floats:
    among signed ones, the largest is that of the positive numbers; among unsigned ones, that of the negative numbers.
    """
    if not chunk.dtype.is_floating_point:
        return
    size = chunk.element_size()
    bits = np.frombuffer(raw_bytes(chunk), _INTEGERS[size])
    sign = 1 << (8 * size - 1)
    magnitude = max(int(bits.max()), int(bits.view(_UNSIGNED[size]).max()) - sign)
    infinity = _INFINITY[chunk.dtype]
    if magnitude > infinity:
        raise CheckpointError(f"tensor {name} contains NaN; such a model cannot be used, and is not converted")
    if converted and magnitude == infinity:
        raise CheckpointError(f"tensor {name} has values that {chunk.dtype} cannot hold; choose a wider --dtype")


def hash_pieces(runs: Iterable[Pieces], dtype: torch.dtype) -> str:
    """The hash of a tensor that is the runs one after the other."""
    digest = xxhash.xxh3_128()
    for run in runs:
        for chunk in run.chunks(dtype):
            digest.update(raw_bytes(chunk))
    return digest.hexdigest()


class Syncer:
    """Makes written files durable without stopping for each: waiting comes at the end.

    One fsync per file while others are being written would commit the file system's journal each time.
    """

    def __init__(self) -> None:
        self._paths: dict[Path, None] = {}
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        """A file that has been written, or a part of it."""
        with self._lock:
            self._paths[path] = None

    def join(self) -> None:
        """Wait until all files are durable.

        Raises:
            OSError: one could not be written to the disk.
        """
        for path in self._paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def _start_writeback(descriptor: int, offset: int, size: int) -> None:
    """Linux's sync_file_range: begin to write dirty pages, wait for nothing. A hint: failure costs time only."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)
