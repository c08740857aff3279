"""Numbers of bytes as people write and read them, in decimal units."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB, 2GiB or 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB, 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def bytes_in_words(count: int) -> str:
    """A number of bytes with three digits or more of its value: 999 B, 1.23 kB, 45.6 MB, 1,234 TB."""
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
