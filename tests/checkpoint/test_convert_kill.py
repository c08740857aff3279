"""A conversion that is killed, or runs out of space, is refused by readers, and the same command finishes it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from mdsp.checkpoint.weights import open_weights
from mdsp.cli import main
from mdsp.errors import MdspError
from tests.checkpoint.jobs import Layout, train
from tests.harness import run_ranks

torch.set_num_threads(1)  # a forked process has no thread pool

TRIALS = 5


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _in_child(action: Callable[[], int], kill_after: float | None = None) -> int:
    """Exit status of `action` in a forked process, negative for the signal that ended it; optionally killed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 layers, about 40 MB: long enough to be hit in the middle."""
    directory = tmp_path_factory.mktemp("model") / "hf"
    config = transformers.LlamaConfig(
        vocab_size=2003, hidden_size=256, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of training, with optimizer state."""
    directory = tmp_path_factory.mktemp("trained")
    run_ranks(train, 4, Layout(tensor=2, data=2), str(directory), 1, (1,))
    return directory


def _commands(source: Path, trained: Path, work: Path) -> dict[str, Callable[[Path], list[str]]]:
    sharded = work / "sharded"
    assert main(["convert", "from-hf", str(source), str(sharded), "--tensor", "4", "--quiet"]) == 0
    return {
        "from-hf": lambda out: ["convert", "from-hf", str(source), str(out), "--tensor", "2", "--pipeline", "3"],
        "reshape": lambda out: ["convert", "reshape", str(sharded), str(out), "--tensor", "2", "--pipeline", "2"],
        "reshape-training": lambda out: ["convert", "reshape", str(trained), str(out), "--tensor", "4"],
        "to-hf": lambda out: ["convert", "to-hf", str(sharded), str(out), "--max-shard-size", "9MB"],
    }


@pytest.mark.parametrize("name", ["from-hf", "reshape", "reshape-training", "to-hf"])
def test_killed_at_random_times(name: str, model: Path, trained: Path, tmp_path: Path) -> None:
    command = _commands(model, trained, tmp_path)[name]
    begun = time.perf_counter()
    assert _in_child(lambda: main(command(tmp_path / "undisturbed"))) == 0
    length = time.perf_counter() - begun
    expected = _contents(tmp_path / "undisturbed")
    draw = random.Random(name)
    out, killed = tmp_path / "out", 0
    for _ in range(TRIALS):
        for attempt in range(2):  # killed, continued and killed again
            status = _in_child(lambda: main(command(out)), draw.uniform(0, length) / (attempt + 1))
            killed += status == -signal.SIGKILL
            if out.exists():
                break
            for path in (out, tmp_path / "out.partial"):
                with pytest.raises(MdspError):
                    open_weights(path)
        if not out.exists():
            assert _in_child(lambda: main(command(out))) == 0
        assert _contents(out) == expected
        assert not (tmp_path / "out.partial").exists()
        shutil.rmtree(out)
    assert killed


@pytest.mark.parametrize(
    ("name", "limit"), [("from-hf", 1_000_000), ("to-hf", 1_000_000), ("reshape-training", 20_000)]
)
def test_no_room_for_a_file(
    name: str, limit: int, model: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = _commands(model, trained, tmp_path)[name]
    assert main(command(tmp_path / "undisturbed")) == 0
    out = tmp_path / "out"

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return main(command(out))

    assert _in_child(limited) == 2
    assert not out.exists()
    with pytest.raises(MdspError, match="unfinished"):
        open_weights(out)
    assert main(command(out)) == 0
    assert _contents(out) == _contents(tmp_path / "undisturbed")


def test_damage_done_meanwhile_is_repaired(model: Path, trained: Path, tmp_path: Path) -> None:
    """Finished layers are taken over only if they still match their hashes."""
    command = _commands(model, trained, tmp_path)["from-hf"]
    assert main(command(tmp_path / "undisturbed")) == 0
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    while not list(partial.glob("*/layer_*.pt")):
        _in_child(lambda: main(command(out)), 0.05)
        assert not out.exists()
    for path in partial.glob("*/layer_*.pt"):
        if path.stat().st_size < 100_000:
            continue  # no tensors, or a norm: the middle of the file is not in a tensor
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert main(command(out)) == 0
    assert _contents(out) == _contents(tmp_path / "undisturbed")


def test_another_command_does_not_continue(
    model: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = _commands(model, trained, tmp_path)["from-hf"]
    out = tmp_path / "out"
    while not (tmp_path / "out.partial").exists():
        _in_child(lambda: main(command(out)), 0.05)
    capfd.readouterr()
    assert main([*command(out), "--dtype", "bfloat16"]) == 2
    assert "something else (dtype" in capfd.readouterr().err
    assert main(["convert", "show", str(tmp_path / "out.partial")]) == 0
    assert "unfinished" in capfd.readouterr().out
    assert main(command(out)) == 0
    assert torch.load(out / "global_step0" / "layer_00-model_00-model_states.pt", weights_only=True)
