"""Files of `torch.save` written piece by piece: the container first, then the tensors' bytes into their places.

`torch.save` needs all tensors of a file in memory and sums up their checksums. `torch.serialization.skip_data` writes
the same container with holes where the data belong; filling these needs no more memory than one chunk. The checksums
inside the container are then those of the holes: `torch.load` does not read them, and the manifest has better ones.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.serialization import skip_data


def create_torch_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], others: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Write a dictionary with tensors of these shapes and types, without their data; returns each one's byte offset.

    `others` are further entries, which hold no tensors.
    """
    # Memory of torch.empty that nobody touches is never provided by the system.
    empty = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in tensors.items()}
    try:
        with skip_data():
            torch.save({**empty, **(others or {})}, path)
    except RuntimeError as error:  # torch's own writer does not say why; a disk without room is what it can be
        raise OSError(errno.ENOSPC, f"cannot be written ({str(error).splitlines()[0]})", str(path)) from None
    reader: Any = torch._C.PyTorchFileReader(str(path))  # its stub lacks the method
    return {key: reader.get_record_offset(f"data/{index}") for index, key in enumerate(tensors)}


def save_small(state: Any, path: Path) -> tuple[int, str]:
    """torch.save of what fits in memory easily; returns (bytes, XXH3-128 of them). OSError says why it cannot be."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    path.write_bytes(data)
    return len(data), xxhash.xxh3_128(data).hexdigest()
