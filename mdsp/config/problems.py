"""What is wrong with a configuration: one line per problem, and all problems in one error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mdsp.errors import ConfigError

MISSING: Final = object()
"""The value of a problem about a key that is not there."""

MOST_RANKS: Final = 10_000_000
"""More than any machine has; beyond it, to look for the nearest legal degrees would take for ever."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One illegal key, value or combination."""

    key: str
    """Dotted key, e.g. `mdsp.parallel.tensor`."""
    value: Any
    """Its value, or MISSING."""
    rule: str
    """What must hold."""
    legal: str = ""
    """The way out: the nearest legal values, or what to do instead."""

    def line(self) -> str:
        """`key = value: rule; legal`."""
        shown = self.key if self.value is MISSING else f"{self.key} = {_shorten(self.value)}"
        return f"{shown}: {self.rule}" + (f"; {self.legal}" if self.legal else "")


def _shorten(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def refuse(source: str, problems: Sequence[Problem]) -> None:
    """Raise one ConfigError with a line for every problem; does nothing when there is none."""
    if not problems:
        return
    lines = list(dict.fromkeys(problem.line() for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    raise ConfigError("\n  ".join([f"{source}: {count}", *lines]))


def nearest(values: Sequence[int], wanted: int, count: int = 4) -> str:
    """The legal numbers closest to the wanted one, smallest first: `nearest: 2, 4`."""
    chosen = sorted(sorted(values, key=lambda v: (abs(v - wanted), v))[:count])
    return f"nearest: {', '.join(map(str, chosen))}" if chosen else ""


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
