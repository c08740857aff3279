"""Hashes of files, without torch."""

from __future__ import annotations

from pathlib import Path

import xxhash

CHUNK_BYTES = 4 * 2**20


def file_hash(path: Path) -> str:
    """XXH3-128 of a file's bytes, hexadecimal. OSError when it cannot be read."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
