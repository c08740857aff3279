"""Reads what W&B wrote while offline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(path: Path) -> Iterator[bytes]:
    """Payloads of a .wandb file: LevelDB's log format, 32 KB blocks of fragments, after a header of 7 bytes.

    A fragment is crc (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last), payload.
    """
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, payload = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        payload += data[position : position + length]
        position += length
        if kind in (1, 4):
            yield payload
            payload = b""


def read_offline_wandb(folder: Path) -> list[dict[str, Any]]:
    """History rows of all offline runs below a folder, oldest run first."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        for payload in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows
