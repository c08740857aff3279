"""Datasets written byte by byte from the description of megatron-core's format, without mdsp's writer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Type code -> struct's letter."""


def raw_dataset(documents: Sequence[Sequence[Sequence[int]]], code: int) -> tuple[bytes, bytes]:
    """`.bin` and `.idx` of documents, each a list of sequences, each a list of token ids."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(struct.pack(f"<{len(s)}{LETTERS[code]}", *s) for s in sequences)
    size = struct.calcsize(f"<{LETTERS[code]}")
    pointers, position = [], 0
    for sequence in sequences:
        pointers.append(position)
        position += size * len(sequence)
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(boundaries))
    index += struct.pack(f"<{len(sequences)}i", *(len(s) for s in sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    return data, index


def write_raw(prefix: Path, documents: Sequence[Sequence[int]], code: int = 8) -> str:
    """Write documents of one sequence each; returns the prefix as a string."""
    data, index = raw_dataset([[document] for document in documents], code)
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix)
