"""Runs side by side: the numbers are the runs', the differences are the configurations', the page renders."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from mdsp.errors import ConfigError
from mdsp.metrics import compare_command
from mdsp.metrics.compare import compare
from mdsp.metrics.run import read_run
from tests.metrics.browser import render
from tests.metrics.runs import step_record, write_run


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare_command.configure(parser)
    return parser.parse_args(words)


def two_runs(folder: Path) -> list[Path]:
    return [write_run(folder / "deep", 8, 8, steps=30), write_run(folder / "shallow", 4, 8, steps=20)]


def test_the_table_shows_results_and_what_differs(tmp_path: Path) -> None:
    found = compare([read_run(run) for run in two_runs(tmp_path)])
    assert found.names == ["deep", "shallow"]
    results = dict(found.results)
    assert results["steps"] == ["30", "20"]
    assert results["training loss"] == [f"{step_record(30).loss:.4f}", f"{step_record(20).loss:.4f}"]
    assert results["bubble %, measured, median"] == [f"{100 * 7 / 15:.1f}", f"{100 * 3 / 11:.1f}"]
    differences = dict(found.differences)
    assert differences["mdsp.parallel.pipeline"] == ["8", "4"]
    assert differences["layout.pipeline"] == ["8", "4"]
    assert "mdsp.parallel.tensor" not in differences


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", steps=2) for parent in ("a", "b")]
    assert compare([read_run(run) for run in runs]).names == [str(run) for run in runs]


def test_the_page_renders_with_a_curve_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "compare.html"
    assert compare_command.main(arguments(*map(str, two_runs(tmp_path)), "-o", str(page))) == 0
    assert "shallow" in capsys.readouterr().out
    rendered = render(page, tmp_path / "profile")
    assert rendered.console == []
    assert 'data-ready="yes"' in rendered.dom
    assert f"<td>{step_record(20).loss:.4f}</td>" in rendered.dom
    loss = re.search(r'<section class="card chart" data-chart="loss">.*?</section>', rendered.dom, re.DOTALL)
    assert loss is not None
    assert len(re.findall("<path", loss[0])) == 2
    # One point a step: the curves end where the runs end.
    assert [len(re.findall("L", path)) + 1 for path in re.findall(r'd="([^"]*)"', loss[0])] == [30, 20]


def test_one_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two or more"):
        compare_command.main(arguments(str(write_run(tmp_path / "run", steps=1))))


def test_a_run_without_configuration_can_be_compared(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    (runs[1] / "run.json").write_text(json.dumps({}))
    assert compare([read_run(run) for run in runs]).names == ["deep", "shallow"]
