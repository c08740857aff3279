"""The `mdsp` command line."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mdsp import __version__, cli
from mdsp.errors import CheckpointError, TrainingError
from tests.config.files import document, write


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write(tmp_path, document()))


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for name, (_, summary) in cli.available_commands().items():
        assert name in out
        assert summary.split()[0] in out


def test_every_listed_command_can_be_run() -> None:
    for name, (module, _) in cli.available_commands().items():
        command = importlib.import_module(module)
        parser = argparse.ArgumentParser(name)
        command.configure(parser)
        assert callable(command.main)


def test_commands_that_are_not_installed_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fly", ("mdsp.wings.command", "fly away"))
    assert "fly" not in cli.available_commands()
    assert "config" in cli.available_commands()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["confg"], "there is no command 'confg' (did you mean 'config'?); the commands are "),
        (["zzz"], "there is no command 'zzz'; the commands are "),
        (["config", "check", "nowhere.json", "--world-size", "1"], "nowhere.json: cannot read the configuration file"),
        (["config", "explain", "nothing"], "nothing is not a known key"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mdsp: error: {message}")
    assert "Traceback" not in captured.err


def test_argparse_mistakes_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["config"], ["config", "check"], ["--nonsense"]):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2
        assert "mdsp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("the checkpoint is damaged"), 2, "the checkpoint is damaged"),
        (TrainingError("loss is NaN"), 1, "loss is NaN"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "No such file or directory: a.txt"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("mdsp.config.command")

    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(command, "main", fail)
    assert cli.main(["config", "explain"]) == code
    assert capsys.readouterr().err == f"mdsp: error: {message}\n"


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command = importlib.import_module("mdsp.config.command")

    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(command, "main", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["config", "explain"])


def test_check_prints_layout_and_batch(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", config, "--world-size", "8", "--set", "train_batch_size=16"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ranks 8 = tensor 2 x pipeline 2 x data 2" in out
    assert "global batch 16 = micro-batch 2 x accumulation 4 x data 2" in out
    assert "tokens per step 512 (sequences of 32)" in out
    assert "pipeline bubble 20.0%" in out
    # 300 x 48 tokens, 1024 x 48 positions, 6 blocks of 12 h^2 + 13 h, and the final norm's 2 h.
    assert f"parameters {(300 + 1024) * 48 + 6 * (12 * 48**2 + 13 * 48) + 2 * 48:,}" in out


def test_check_as_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", config, "--world-size", "8", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["layout"]["data"] == 2
    assert content["deepspeed"]["train_batch_size"] == 16
    assert content["model"]["ffn_size"] == 192
    assert content["mdsp"]["parallel"]["tensor"] == 2


def test_check_names_every_problem(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "check", config, "--world-size", "6", "--set", "wall_clock_breakdown=true"]
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"mdsp: error: {config}: 2 problems"
    assert lines[1].startswith("  mdsp.parallel = ") and lines[2].startswith("  wall_clock_breakdown = true: ")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mdsp", *arguments], capture_output=True, text=True, check=False)


def test_the_command_itself(config: str) -> None:
    assert run("--version").stdout == f"mdsp {__version__}\n"
    bad = run("config", "check", config, "--world-size", "7")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("mdsp: error: ") == 1 and "Traceback" not in bad.stderr


@pytest.mark.parametrize("words", [["convert", "show"], ["checkpoint", "list"], ["report"]])
def test_names_that_the_terminal_cannot_show(words: list[str], tmp_path: Path) -> None:
    """ASCII only: a message with escapes, and no traceback."""
    command = [sys.executable, "-m", "mdsp", *words, str(tmp_path / "Modéll")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("mdsp: error: ")
    assert "Mod\\xe9ll" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mdsp config explain --markdown | head -n 1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "# Configuration\n"
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["config explain mdsp.monitor", "plan --list"])
def test_output_that_cannot_be_written(command: str) -> None:
    """On a full disk, one message; with standard output closed, silence."""
    line = f"unset PYTHONUNBUFFERED; {sys.executable} -m mdsp {command}"
    full = subprocess.run(["bash", "-c", f"{line} > /dev/full"], capture_output=True, text=True, check=False)
    assert (full.returncode, full.stderr) == (1, "mdsp: error: No space left on device\n")
    closed = subprocess.run(["bash", "-c", f"{line} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")
