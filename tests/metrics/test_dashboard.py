"""The W&B workspace: its panels show series that runs report, W&B's objects accept it, offline gives a file."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from mdsp.errors import ConfigError
from mdsp.metrics import dashboard_command
from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.dashboard import X_AXIS, sections, workspace
from mdsp.metrics.series import values
from tests.metrics.runs import step_record, timeline, with_bubble, write_run


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    dashboard_command.configure(parser)
    return parser.parse_args(words)


def test_every_panel_shows_what_a_run_reports() -> None:
    record = with_bubble(step_record(3, eval_loss=2.0), analyse_step(timeline(4, 8)))
    reported = set(values(record.as_dict()))
    assert X_AXIS in reported
    shown: set[str] = set()
    for section in sections():
        for panel in section.panels:
            matched = {key for key in reported if panel.metric_regex and re.fullmatch(panel.metric_regex, key)}
            found = set(panel.metrics) | matched
            assert found, f"panel {panel.title} is empty"
            assert found <= reported
            shown |= found
    # What is left out repeats a series that is shown.
    assert reported - shown == {"train/step", "speed/samples_per_s", "speed/hfu_percent"}


def test_wandb_workspaces_accepts_the_definition() -> None:
    made = workspace("mdsp", "team", "project")
    assert [section.name for section in made.sections] == [section.title for section in sections()]
    specification = made._to_model().model_dump_json(by_alias=True)
    for key in ("train/loss", "bubble/measured_percent", "stage_busy/", "speed/model_tflops_causal_half"):
        assert key in specification


def test_offline_the_definition_is_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert dashboard_command.main(arguments("--project", "gpt", "--entity", "team")) == 0
    assert "cannot be reached" in capsys.readouterr().err
    written = json.loads((tmp_path / "mdsp-dashboard.json").read_text())
    assert (written["project"], written["entity"], written["x"]) == ("gpt", "team", X_AXIS)
    assert [section["title"] for section in written["sections"]][:3] == ["Learning", "Speed", "Pipeline bubble"]


def test_project_and_team_come_from_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    info = json.loads((run / "run.json").read_text())
    info["deepspeed"]["wandb"] = {"enabled": True, "project": "from-run", "team": "people"}
    (run / "run.json").write_text(json.dumps(info))
    output = tmp_path / "dashboard.json"
    assert dashboard_command.main(arguments(str(run), "-o", str(output))) == 0
    written = json.loads(output.read_text())
    assert (written["project"], written["entity"]) == ("from-run", "people")


def test_an_unknown_project_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --project"):
        dashboard_command.main(arguments())
