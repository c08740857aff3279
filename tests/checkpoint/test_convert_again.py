"""The same command again, when its output is complete: it says so and is content; anything else is in the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mdsp.cli import main
from tests.checkpoint.hf_models import hf_directory
from tests.checkpoint.jobs import Layout, train
from tests.harness import run_ranks

COMMANDS = ["from-hf", "reshape", "reshape-training", "to-hf", "to-hf-in-shards"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    run_ranks(train, 2, Layout(tensor=2), str(directory), 1, (1,))
    return directory


@pytest.fixture
def commands(trained: Path, tmp_path: Path) -> dict[str, Callable[[Path], list[str]]]:
    """Each with a source of its own that may be changed."""
    hf, sharded, run = (tmp_path / name for name in ("hf", "sharded", "run"))
    shutil.copytree(hf_directory("llama"), hf)
    shutil.copytree(trained, run)
    (hf / "tokenizer.json").write_text("{}")
    assert main(["convert", "from-hf", str(hf), str(sharded), "--tensor", "2"]) == 0
    return {
        "from-hf": lambda out: ["convert", "from-hf", str(hf), str(out), "--tensor", "4"],
        "reshape": lambda out: ["convert", "reshape", str(sharded), str(out)],
        "reshape-training": lambda out: ["convert", "reshape", str(run), str(out)],
        "to-hf": lambda out: ["convert", "to-hf", str(sharded), str(out)],
        "to-hf-in-shards": lambda out: ["convert", "to-hf", str(sharded), str(out), "--max-shard-size", "30KB"],
    }


def _contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def _flip_a_bit_of_data(path: Path) -> None:
    """The longest stretch of bytes without zeros lies in a tensor."""
    data = bytearray(path.read_bytes())
    longest = max(data.split(b"\0\0\0\0\0\0\0\0"), key=len)
    place = data.index(longest) + len(longest) // 2
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", COMMANDS)
def test_complete_already(
    name: str, commands: dict[str, Callable[[Path], list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(commands[name](out)) == 0
    assert "complete already" not in capsys.readouterr().out
    before = _contents(out)
    assert main(commands[name](out)) == 0
    assert f"{out}: is complete already" in capsys.readouterr().out
    assert _contents(out) == before
    out.rename(tmp_path / "out.partial")  # as a kill leaves it that came just before this very act
    assert main(commands[name](out)) == 0
    assert f"{out}: is complete already" in capsys.readouterr().out
    assert _contents(out) == before and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_something_else_is_in_the_way(
    name: str, commands: dict[str, Callable[[Path], list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another command, a damaged tensor or file, a missing one, a file of other content: told, and left as it is."""
    out = tmp_path / "out"
    command = commands[name](out)
    assert main(command) == 0

    def refused(command: list[str]) -> str:
        before = _contents(out)
        capsys.readouterr()
        assert main(command) == 2
        assert _contents(out) == before
        message = capsys.readouterr().err
        assert f"{out} exists already, and is not what this command makes (" in message
        return message

    refused([*command, "--dtype", "bfloat16"])
    weights = sorted([*out.rglob("layer_0[23]*.pt"), *out.glob("*.safetensors"), *out.rglob("exp_avg.pt")])
    assert weights
    for path in (*weights, *out.rglob("tokenizer.json")):
        good = path.read_bytes()
        if path.name == "tokenizer.json":
            path.write_text("[]")
        else:
            _flip_a_bit_of_data(path)
        refused(command)
        path.unlink()
        refused(command)
        path.write_bytes(good)
    for path in list(out.glob("latest*")):
        good = path.read_bytes()
        path.write_text("global_step7")
        refused(command)
        path.unlink()
        refused(command)
        path.write_bytes(good)
    capsys.readouterr()
    assert main(command) == 0
    assert "is complete already" in capsys.readouterr().out


def test_another_source(
    commands: dict[str, Callable[[Path], list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source that has been written anew is another one, and so is another checkpoint at the same path."""
    for name in ("from-hf", "reshape"):
        assert main(commands[name](tmp_path / name)) == 0
    os.utime(tmp_path / "hf" / "model.safetensors", ns=(1, 1))
    assert main(commands["from-hf"](tmp_path / "from-hf")) == 2
    assert "from another source" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "sharded")
    assert main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "sharded"), "--tensor", "4"]) == 0
    assert main(commands["reshape"](tmp_path / "reshape")) == 2
    assert "from another source" in capsys.readouterr().err


def test_anything_else_is_in_the_way(
    commands: dict[str, Callable[[Path], list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("")
    for name in COMMANDS:
        for out in (tmp_path / "file", tmp_path / "folder"):
            assert main(commands[name](out)) == 2
            assert f"{out} exists already" in capsys.readouterr().err
    assert (tmp_path / "folder" / "precious").exists() and not list(tmp_path.glob("*.partial"))
