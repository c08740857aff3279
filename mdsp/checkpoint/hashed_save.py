"""torch.save that hashes the file while writing it, and passes every tensor's bytes from memory to the disk once.

`torch.serialization.skip_data` writes the container with holes where tensors belong. The file is then gone through from
its first byte to its last: what is container is read back and hashed, what is tensor is hashed and written into its
place at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.serialization import skip_data

from mdsp.checkpoint.atomic import write_at
from mdsp.checkpoint.pieces import raw_bytes

CHUNK_BYTES = 8 * 2**20


def tensors_of(state: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples, in the order in which pickle meets them."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def _skeleton(state: Any, path: Path) -> list[tuple[int, Tensor]]:
    """Write the container; returns (byte offset, tensor) of each hole, by offset."""
    distinct = list({id(tensor): tensor for tensor in tensors_of(state)}.values())
    checksums = torch.serialization.get_crc32_options()
    try:
        # torch.load does not look at the container's checksums, which would be those of the holes.
        torch.serialization.set_crc32_options(False)
        with skip_data():
            torch.save(state, path)
    except RuntimeError as error:
        _raise_reason(path, sum(tensor.nbytes for tensor in distinct), error)
    finally:
        torch.serialization.set_crc32_options(checksums)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    holes = {name for name in reader.get_all_records() if name.startswith("data/")}
    if holes != {f"data/{index}" for index in range(len(distinct))}:
        torch.save(state, path)  # tensors that share storage, or hide in objects: slower, and right
        return []
    return sorted(
        ((reader.get_record_offset(f"data/{index}"), tensor) for index, tensor in enumerate(distinct)),
        key=lambda hole: hole[0],
    )


def _raise_reason(path: Path, size: int, error: RuntimeError) -> None:
    """OSError for what torch's writer only calls a failed write: the system says why when asked again."""
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\0", size)
    raise OSError(f"{path.name}: {error}") from error


def hashed_save(state: Any, path: Path) -> tuple[int, str]:
    """Write `state` as torch.save does, flushed to the disk; returns (bytes, XXH3-128 of them).

    Args:
        state: nested dictionaries, lists and tuples; every tensor on the CPU, contiguous, owning all of its storage.
        path: the file.

    Raises:
        OSError: it could not be written.
    """
    holes = _skeleton(state, path)
    digest = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        position = 0
        with ThreadPoolExecutor(1) as writer:
            for offset, tensor in holes:
                digest.update(_read(descriptor, position, offset))
                data = raw_bytes(tensor.flatten())
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    written = writer.submit(write_at, descriptor, chunk, offset + start)
                    digest.update(chunk)  # meanwhile: both leave other threads running
                    written.result()
                position = offset + len(data)
        digest.update(_read(descriptor, position, size))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """Container bytes, of which there are few."""
    found = b""
    while start + len(found) < stop:
        piece = os.pread(descriptor, stop - start - len(found), start + len(found))
        if not piece:
            raise OSError("the file ends before its container does")
        found += piece
    return found
