"""Pieces: a tensor that lies in several places, read row by row without ever being assembled as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 2**20
"""Bytes that are handled at a time: large enough to be fast, small enough to stay in a core's cache for all passes."""


@dataclass(frozen=True)
class Pieces:
    """`torch.cat(views, dim)`, where the views usually lie in memory-mapped files."""

    views: tuple[Tensor, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        shape = list(self.views[0].shape)
        shape[self.dim] = sum(view.shape[self.dim] for view in self.views)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements; all views have the same."""
        return self.views[0].dtype

    def narrow(self, dim: int, start: int, stop: int) -> Pieces:
        """Rows (dim 0) or columns (dim 1) `start:stop` of the whole."""
        if dim != self.dim:
            return Pieces(tuple(view.narrow(dim, start, stop - start) for view in self.views), self.dim)
        found, offset = [], 0
        for view in self.views:
            length = view.shape[dim]
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                found.append(view.narrow(dim, low, high - low))
            offset += length
        return Pieces(tuple(found) or (self.views[0].narrow(dim, 0, 0),), dim)

    def transposed(self) -> Pieces:
        """The transposed matrix."""
        return Pieces(tuple(view.t() for view in self.views), 1 - self.dim)

    def materialize(self) -> Tensor:
        """The whole, in memory of its own."""
        return torch.cat(self.views, self.dim)

    def chunks(self, dtype: torch.dtype, see: Callable[[Tensor], None] | None = None) -> Iterator[Tensor]:
        """The elements in row-major order as contiguous one-dimensional tensors of about `CHUNK_BYTES`.

        What is already contiguous and of this type is not copied. The rest goes through one buffer per thread, so a
        chunk is valid until the thread asks for the next one. `see` gets the views before they are read.
        """
        for rows in self.views if self.dim == 0 else (self.views,):
            parts: Sequence[Tensor] = (rows,) if isinstance(rows, Tensor) else rows
            if len(parts) == 1 and parts[0].is_contiguous() and parts[0].dtype == dtype:
                for chunk in parts[0].reshape(-1).split(max(1, CHUNK_BYTES // parts[0].element_size())):
                    if see is not None:
                        see(chunk)
                    yield chunk
                continue
            count = parts[0].shape[0]
            widths = [part.shape[1] if part.dim() > 1 else 1 for part in parts]
            width = sum(widths)
            step = max(1, CHUNK_BYTES // max(1, width * dtype.itemsize))
            buffer = _buffer(min(step, count) * width * dtype.itemsize).view(dtype)
            for start in range(0, count, step):
                rows_here = min(step, count - start)
                chunk = buffer[: rows_here * width]
                columns = chunk.view(rows_here, width).split(widths, dim=1)
                for part, column in zip(parts, columns, strict=True):
                    rows_of_part = part[start : start + rows_here]
                    if see is not None:
                        see(rows_of_part)
                    column.copy_(rows_of_part.reshape(rows_here, -1))
                yield chunk


_buffers = threading.local()


def _buffer(size: int) -> Tensor:
    """`size` bytes of this thread's scratch memory, which is allocated once and used thousands of times."""
    held: Tensor | None = getattr(_buffers, "held", None)
    if held is None or held.numel() < size:
        held = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8)
        _buffers.held = held
    return held[:size]


def raw_bytes(chunk: Tensor) -> memoryview:
    """The memory of a contiguous one-dimensional tensor."""
    return chunk.view(torch.uint8).numpy().data
