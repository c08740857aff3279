"""`mdsp.model` to ModelConfig: a family with options, or a Hugging Face directory. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from mdsp.config.keys import field_type, problems_of, section_of, suggestion
from mdsp.config.problems import MISSING, Problem
from mdsp.config.schema import HfModel
from mdsp.errors import MdspError
from mdsp.families import family_names, get_family, model_config_from_hf
from mdsp.model.config import ModelConfig


def resolve_model(section: Mapping[str, Any]) -> tuple[ModelConfig | None, list[Problem]]:
    """The model of the section, or None and what is wrong with it."""
    return _from_hf(section) if "from_hf" in section else _from_family(section)


def _from_hf(section: Mapping[str, Any]) -> tuple[ModelConfig | None, list[Problem]]:
    problems = [
        Problem(
            f"mdsp.model.{key}", value, f"comes from the Hugging Face directory; only {_changeable()} may be changed"
        )
        for key, value in section.items()
        if key in ModelConfig.model_fields and key not in HfModel.model_fields
    ]
    given = {key: value for key, value in section.items() if f"mdsp.model.{key}" not in {p.key for p in problems}}
    try:
        chosen = HfModel.model_validate(given, strict=True)
    except ValidationError as error:
        return None, problems + problems_of(error, HfModel, "mdsp.model.")
    if problems:
        return None, problems
    try:
        model = model_config_from_hf(Path(chosen.from_hf))
    except MdspError as error:
        return None, [Problem("mdsp.model.from_hf", chosen.from_hf, str(error))]
    return model.model_copy(update=chosen.model_dump(exclude={"from_hf"}, exclude_none=True)), []


def _changeable() -> str:
    return ", ".join(name for name in HfModel.model_fields if name != "from_hf")


def _from_family(section: Mapping[str, Any]) -> tuple[ModelConfig | None, list[Problem]]:
    problems: list[Problem] = []
    if "family" not in section:
        problems.append(Problem("mdsp.model", MISSING, 'needs "family", the kind of model, or "from_hf", a directory'))
    elif isinstance(family := section["family"], str) and family not in family_names():
        hint = suggestion(family, family_names(), "families")
        problems.append(Problem("mdsp.model.family", family, "is not a known family", hint))
    for name, field in ModelConfig.model_fields.items():
        if field.is_required() and name not in section:
            problems.append(Problem(f"mdsp.model.{name}", MISSING, f"is required: {field_type(field)}"))
    for key, value in section.items():
        problems += _check_option(key, value)
    if problems:
        return None, problems
    try:
        return get_family(section["family"]).model_config(section), []
    except MdspError as error:
        return None, [Problem("mdsp.model", MISSING, str(error))]


def _check_option(key: str, value: Any) -> list[Problem]:
    """Type and bounds of one option, by itself: families derive some from others and need them to be right."""
    name, field = f"mdsp.model.{key}", ModelConfig.model_fields.get(key)
    if field is None:
        return [Problem(name, value, "is not a known key", suggestion(key, [*ModelConfig.model_fields, "from_hf"]))]
    checked: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(checked).validate_python(value, strict=True)
    except ValidationError as error:
        inner = section_of(field.annotation)
        if inner is not None and isinstance(value, dict):
            return problems_of(error, inner, f"{name}.")
        return [Problem(name, value, f"must be {field_type(field)}")]
    return []
