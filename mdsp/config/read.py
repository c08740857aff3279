"""Reading the JSON file and applying `--set` overrides: plain data in, plain data out, mistakes named."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdsp.config.deepspeed_schema import RunFile
from mdsp.config.keys import section_of, suggestion
from mdsp.config.refused_keys import refusal
from mdsp.errors import ConfigError


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file.

    Stricter than Python's reader: no key twice in one object, no NaN or infinite number, and comments are named as
    such. Raises ConfigError with file, line and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}") from None
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: {_explain(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null", bool: "true or false"}.get(type(value), "a number")
        raise ConfigError(f"{path}: the file holds {kind}; it must hold one object: {{...}}")
    return value


def parse_json(text: str) -> Any:
    """Strict JSON. Raises JSONDecodeError with a position, or ValueError with a sentence."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError("the objects are nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'key "{key}" appears twice in one object, and only one can be meant; delete the other')
        found[key] = value
    return found


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number; write a finite number, or null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _integer(text: str) -> int:
    # Python refuses more than 4300 digits in words of its own, and nothing here counts beyond 64 bits.
    if len(text) > 19:
        raise ValueError(f"{text[:24]}... is too large for an integer")
    return int(text)


def _explain(error: json.JSONDecodeError) -> str:
    rest = error.doc[error.pos :].lstrip()
    if rest.startswith(("//", "#", "/*")):
        return "JSON has no comments; delete it"
    if error.msg == "Extra data":
        return f"the object ends here, but more text follows: {rest[:20]!r}"
    if rest.startswith(("}", "]")):
        return "a comma before a closing bracket; delete the comma"
    if not rest:
        return "the file ends too early; a bracket or a quote is not closed"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:].removesuffix(' at')} at {rest[:20]!r}"


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `a.b=value` overrides to the file's data, in order.

    The value is read as JSON, and as a string where it is not JSON. List elements are reached by index. Sections on the
    way are made where the schema has them. Raises ConfigError naming the override.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {override}: must have the form key=value, e.g. --set mdsp.parallel.tensor=2")
        try:
            value = parse_json(text)
        except json.JSONDecodeError:
            value = text
        except ValueError as error:
            raise ConfigError(f"--set {override}: {error}") from None
        _check_key(override, parts)
        _assign(document, parts, value, override)


def _check_key(override: str, parts: Sequence[str]) -> None:
    """Refuse keys that the schema does not have. Free sections (dictionaries) are checked with the whole file."""
    section: type[Any] | None = RunFile
    for depth, part in enumerate(parts):
        if section is None:
            return
        field = section.model_fields.get(part)
        if field is None:
            key = ".".join(parts[: depth + 1])
            reason = refusal(key)
            if reason is None:
                reason = f"is not a known key; {suggestion(part, section.model_fields)}"
            raise ConfigError(f"--set {override}: {key} {reason}")
        section = section_of(field.annotation)


def _assign(document: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    here: Any = document
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        key = ".".join(parts[:depth])
        if isinstance(here, dict):
            if last:
                here[part] = value
            elif here.get(part) is None:
                here[part] = {}
            here = here[part]
        elif isinstance(here, list):
            if not part.isdecimal() or int(part) >= len(here):
                raise ConfigError(
                    f"--set {override}: {part} is no index of {key}, a list of {len(here)} (the first index is 0)"
                )
            if last:
                here[int(part)] = value
            here = here[int(part)]
        else:
            raise ConfigError(f"--set {override}: {key} is {json.dumps(here)} and has no keys inside it")
