"""The keys of the schema: walking them, naming their types, finding the nearest, reading pydantic's complaints.

Everything that speaks about keys (messages, `--set`, `mdsp config explain`, the documentation) reads the schema here.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mdsp.config.problems import MISSING, Problem
from mdsp.config.refused_keys import refusal


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema."""

    name: str
    """Dotted name."""
    type: str
    """Its type in words, with the bounds of numbers."""
    default: str
    """Its default as JSON, or "required"."""
    doc: str
    """The sentence under the field."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also where it may be null; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [section for arm in typing.get_args(annotation) if (section := section_of(arm)) is not None]
    return found[0] if found and typing.get_origin(annotation) in (types.UnionType, typing.Union) else None


def type_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type in words: `integer > 0`, `"none", "selective" or "full"`, `list of string or null`."""
    origin, arms = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(arm, metadata) for arm in arms)
    if origin is typing.Annotated:
        return type_text(arms[0], [item for extra in arms[1:] for item in getattr(extra, "metadata", ())])
    if origin is typing.Literal:
        words = [json.dumps(arm) for arm in arms]
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    if origin is list:
        lengths = [str(n) for item in metadata if (n := getattr(item, "min_length", None)) is not None]
        return " ".join(["list of", *lengths, type_text(arms[0])])
    if annotation in (int, float):
        bounds = [
            f"{sign} {bound:g}"
            for item in metadata
            for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
            if (bound := getattr(item, attribute, None)) is not None
        ]
        return " ".join(["integer" if annotation is int else "number", " and ".join(bounds)]).strip()
    if annotation is type(None):
        return "null"
    return {bool: "true or false", str: "string"}.get(annotation, "object")


@functools.cache
def docs_of(section: type[BaseModel]) -> dict[str, str]:
    """Field -> the sentence under it, for a section. Read from the source only when asked for, to start quickly."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            words = " ".join(str(ast.literal_eval(text.value)).split())
            found[field.target.id] = re.sub(r"\bNone\b", "null", words)  # as it is written in JSON
    return found


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All keys of a section and of the sections inside it, in the order of the schema."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from keys_of(inner, f"{prefix}{name}.")
            continue
        yield Key(f"{prefix}{name}", field_type(field), _default(field), docs_of(section).get(name, ""))


def field_type(field: FieldInfo) -> str:
    """`type_text` of a field."""
    return type_text(field.annotation, field.metadata)


def _element_type(field: FieldInfo) -> str:
    arms = [arm for arm in (field.annotation, *typing.get_args(field.annotation)) if typing.get_origin(arm) is list]
    return type_text(typing.get_args(arms[0])[0]) if arms else field_type(field)


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))


def suggestion(word: str, known: Iterable[str], what: str = "keys") -> str:
    """The known word that is nearest to a mistyped one, as `did you mean "x"?`, or all of them when none is near."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"the {what} are {', '.join(names)}" if len(names) <= 20 else "see `mdsp config explain`"


def _locate(section: type[BaseModel], loc: Sequence[int | str]) -> tuple[list[str], FieldInfo | None, type[BaseModel]]:
    """The dotted parts of a pydantic location without its union branches, the last field on the way, and the section
    that holds the last part."""
    parts: list[str] = []
    here: type[BaseModel] | None = section
    holder, field = section, None
    for step in loc:
        if isinstance(step, int):
            parts.append(str(step))
        elif here is not None:
            holder = here
            parts.append(step)
            field = here.model_fields.get(step)
            here = section_of(field.annotation) if field is not None else None
    return parts, field, holder


def problems_of(error: ValidationError, section: type[BaseModel], prefix: str = "") -> list[Problem]:
    """Pydantic's complaints about a section, in our words: one problem per key."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        parts, field, holder = _locate(section, item["loc"])
        key = prefix + ".".join(parts) if parts else prefix.rstrip(".")
        value, kind = item["input"], item["type"]
        if kind == "extra_forbidden":
            reason = refusal(key)
            if reason is not None:
                problem = Problem(key, value, reason)
            else:
                problem = Problem(key, value, "is not a known key", suggestion(parts[-1], holder.model_fields))
        elif kind == "missing":
            wanted = f"is required: {field_type(field)}" if field is not None else "is required"
            problem = Problem(key, MISSING, wanted, docs_of(holder).get(parts[-1], "").rstrip("."))
        elif kind == "value_error":
            problem = Problem(key, MISSING, item["msg"].removeprefix("Value error, "))
        elif field is not None:
            inside_list = bool(item["loc"]) and isinstance(item["loc"][-1], int)
            problem = Problem(key, value, f"must be {_element_type(field) if inside_list else field_type(field)}")
        else:
            problem = Problem(key or "the file", value, item["msg"])
        found.setdefault(key if kind != "value_error" else key + item["msg"], problem)
    return list(found.values())
