"""The safetensors format: reading a header with every check, mapping tensors, and laying out a new file.

A file is 8 bytes with the length of the header (little endian), the header (JSON: name -> dtype, shape, byte range),
and the tensors' bytes. See https://github.com/huggingface/safetensors for the specification.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mdsp.config.read import parse_json
from mdsp.errors import CheckpointError

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the format's own library


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `start` is its byte offset in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        CheckpointError: cut off, damaged, or with a type of elements that mdsp does not know.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path} is no safetensors file, or is cut off within its header")
        text = file.read(length)
    try:
        header = parse_json(text.decode())  # refuses a name that is there twice, as the format does
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(path, name, values, 8 + length) for name, values in header.items()}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header ({type(error).__name__}: {error})") from None
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.size)):
        if entry.start != end:
            raise CheckpointError(f"{path}: tensor {entry.name} does not begin where the one before it ends")
        end += entry.size
        if end > size:
            raise CheckpointError(
                f"{path} is cut off: tensor {entry.name} needs bytes up to {end}, the file has {size}"
            )
    if end != size:
        raise CheckpointError(f"{path} has {size - end} bytes after its last tensor; the file is damaged")
    return entries, metadata if isinstance(metadata, dict) else {}


def _entry(path: Path, name: str, values: dict[str, object], base: int) -> Entry:
    kind, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if kind not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has elements of type {kind}, which mdsp does not convert (quantised models are not "
            f"supported)"
        )
    assert isinstance(shape, list) and isinstance(offsets, list) and isinstance(kind, str)
    if not all(isinstance(one, int) and one >= 0 for one in (*shape, *offsets)) or len(offsets) != 2:
        raise ValueError(f"bad numbers for {name}")
    entry = Entry(name, _DTYPES[kind], tuple(shape), base + offsets[0])
    if entry.size != offsets[1] - offsets[0]:
        raise CheckpointError(f"{path}: tensor {name} of shape {shape} has {offsets[1] - offsets[0]} bytes")
    return entry


def map_tensor(mapped: Tensor, entry: Entry) -> Tensor:
    """The tensor of an entry as a view of the mapped file (a copy where its bytes are not aligned)."""
    raw = mapped[entry.start : entry.start + entry.size]
    if entry.start % entry.dtype.itemsize:
        raw = raw.clone()
    return raw.view(entry.dtype).view(entry.shape)


def map_file(path: Path) -> Tensor:
    """The bytes of a file, mapped: nothing is read before it is used, and nothing counts as the process's own."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def plan_file(
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Header bytes and entries of a new file with these tensors, in this order."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset, sizes = 0, []
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        sizes.append(offset)
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = {
        name: Entry(name, dtype, shape, base + start)
        for (name, dtype, shape), start in zip(tensors, sizes, strict=True)
    }
    return struct.pack("<Q", len(text)) + text, entries
