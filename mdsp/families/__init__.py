"""Hugging Face model families: what their `config.json` means, and which tensor holds which parameter. No torch."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from mdsp.errors import ConfigError
from mdsp.families.family import Family
from mdsp.model.config import ModelConfig

_NAMES = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "olmo2",
    "starcoder2",
    "granite",
    "stablelm",
)

_MAX_CONFIG_BYTES = 16 * 2**20  # a config.json is kilobytes; anything else is not one


def family_names() -> tuple[str, ...]:
    """Names of all families, as in `model_type` of a Hugging Face `config.json`."""
    return _NAMES


def get_family(name: str) -> Family:
    """The family of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _NAMES:
        raise ConfigError(f"unknown model family {name!r}; known are {', '.join(_NAMES)}")
    family: Family = importlib.import_module(f"mdsp.families.{name}").FAMILY
    return family


def read_hf_config(hf_dir: Path) -> dict[str, object]:
    """The `config.json` of a Hugging Face directory, as it is.

    Raises:
        ConfigError: not there, or not a JSON object.
    """
    path = hf_dir / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes; it is no model configuration")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the directory of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; it is no model configuration") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values


def model_config_from_hf(hf_dir: Path) -> ModelConfig:
    """The model that a Hugging Face directory holds.

    Raises:
        ConfigError: no readable `config.json`, an unknown `model_type`, or a field that mdsp does not compute.
    """
    values = read_hf_config(hf_dir)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{hf_dir / 'config.json'} has no model_type; known are {', '.join(_NAMES)}")
    return get_family(model_type).config_from_hf(values)


__all__ = ["Family", "family_names", "get_family", "model_config_from_hf", "read_hf_config"]
