"""The scripts in launch/ and the packaging files."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_can_be_started(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK) or script.suffix == ".sbatch"  # sbatch reads it


@pytest.mark.parametrize("script", ["train_local.sh", "train_hostfile.sh"])
def test_scripts_say_how_they_are_used(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"launch/{script} FILE" in done.stderr


def test_requirements_are_exact_and_installed() -> None:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        name, _, version = line.partition("==")
        assert importlib.metadata.version(name).partition("+")[0] == version, line


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (r for group in groups for r in group):
        name = requirement.partition(">")[0].partition("=")[0]
        assert name in pinned, requirement
