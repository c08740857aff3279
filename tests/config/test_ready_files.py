"""The files in ds_configs/ are legal."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdsp.config.load import load_run_config
from mdsp.config.read import read_json

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ready_file_is_legal(path: Path) -> None:
    parallel = read_json(path)["mdsp"]["parallel"]
    for data in (1, 2):
        run = load_run_config(path, [], parallel.get("tensor", 1) * parallel.get("pipeline", 1) * data)
        assert run.layout.data == data


def test_there_are_ready_files() -> None:
    assert FILES
