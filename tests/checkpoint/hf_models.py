"""Hugging Face directories for conversion tests: each case of `tests.families.models` is made once per test run."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.families.models import save_model

_ROOT = tempfile.TemporaryDirectory(prefix="mdsp-hf-models-")


@functools.cache
def hf_directory(case: str) -> Path:
    """A directory as `transformers` saves it. Not to be changed."""
    directory = Path(_ROOT.name) / case
    save_model(case, directory)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a directory, read by the format's own library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()  # not a dictionary
            for name in names:
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def assert_same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Same names, types, shapes and bytes."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


def copy_with(source: Path, target: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    """A directory with these tensors and with the configuration of another, changed in some fields (None: removed)."""
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    for key, value in fields.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (target / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return target
