"""Configuration mistakes are found without torch and DeepSpeed, and help without pydantic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.files import document, write

HEAVY = ("torch", "deepspeed", "transformers", "numpy", "rich", "tokenizers", "datasets")


def loaded_modules(statement: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys, json\n{statement}\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path, document())
    modules = loaded_modules(f"from mdsp.config.load import load_run_config; load_run_config({str(path)!r}, [], 8)")
    assert "mdsp.config.rules" in modules
    assert modules.isdisjoint(HEAVY)


def test_refusing_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path, document() | {"nonsense": 1})
    modules = loaded_modules(
        f"from mdsp.cli import main; assert main(['config', 'check', {str(path)!r}, '--world-size', '8']) == 2"
    )
    assert "mdsp.config.rules" in modules
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", "--help"]])
def test_help_imports_only_the_standard_library(arguments: list[str]) -> None:
    modules = loaded_modules(
        f"from mdsp.cli import main\ntry: main({arguments!r})\nexcept SystemExit as end: assert end.code == 0"
    )
    ours = {name for name in modules if name.startswith("mdsp")}
    assert ours <= {"mdsp", "mdsp.cli", "mdsp.errors", "mdsp.config", "mdsp.config.command"}
    assert modules.isdisjoint((*HEAVY, "pydantic"))
