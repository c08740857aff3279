"""Which checkpoint is taken, and that damaged and hostile ones are not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from mdsp.checkpoint.engine_io import read_file
from mdsp.checkpoint.resume import check_same_model, find_checkpoint
from mdsp.cli import main
from mdsp.errors import CheckpointError
from mdsp.model.config import ModelConfig
from tests.checkpoint.jobs import Layout, train
from tests.harness import run_ranks

SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(train, 1, Layout(), str(folder), 3, (1, 2, 3))
    return folder


@pytest.fixture
def checkpoints(pristine: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Any] = {
    "bit flipped": lambda folder: flip_bit(folder / SHARD),
    "bit of a weight flipped": lambda folder: flip_bit(folder / "layer_03-model_00-model_states.pt"),
    "truncated": lambda folder: os.truncate(folder / SHARD, 1000),
    "emptied": lambda folder: os.truncate(folder / SHARD, 0),
    "shard missing": lambda folder: (folder / "layer_02-model_00-model_states.pt").unlink(),
    "manifest missing": lambda folder: (folder / "mdsp.json").unlink(),
    "manifest truncated": lambda folder: os.truncate(folder / "mdsp.json", 700),
    "manifest of zeros": lambda folder: (folder / "mdsp.json").write_bytes(bytes(1000)),
    "everything missing": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_auto_passes_over_what_is_damaged(kind: str, checkpoints: Path) -> None:
    DAMAGE[kind](checkpoints / "global_step3")
    found = find_checkpoint(checkpoints, "auto")
    assert found is not None and found.step == 2
    assert found.path == checkpoints / "global_step2"
    (reason,) = found.passed_over
    assert "global_step3" in reason


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_requested_checkpoint_that_is_damaged_is_fatal(kind: str, checkpoints: Path) -> None:
    DAMAGE[kind](checkpoints / "global_step3")
    with pytest.raises(CheckpointError, match="global_step3"):
        find_checkpoint(None, str(checkpoints / "global_step3"))


def test_requests(checkpoints: Path, tmp_path: Path) -> None:
    assert find_checkpoint(checkpoints, "none") is None
    assert find_checkpoint(tmp_path / "nowhere", "auto") is None
    requested = find_checkpoint(None, str(checkpoints / "global_step1"))
    assert requested is not None and requested.step == 1
    newest = find_checkpoint(None, str(checkpoints))
    assert newest is not None and newest.step == 3
    (tmp_path / "empty").mkdir()
    for missing in (tmp_path / "nowhere", tmp_path / "empty", checkpoints / "global_step7"):
        with pytest.raises(CheckpointError, match=r"Use|no mdsp\.json|no complete"):
            find_checkpoint(checkpoints, str(missing))


@pytest.mark.parametrize("latest", ["global_step9", "../global_step3", "", "\0", None])
def test_latest_is_a_hint_that_may_point_nowhere(latest: str | None, checkpoints: Path) -> None:
    if latest is None:
        (checkpoints / "latest").unlink()
    else:
        (checkpoints / "latest").write_text(latest)
    found = find_checkpoint(checkpoints, "auto")
    assert found is not None and found.step == 3


def test_auto_does_not_start_afresh_when_all_are_damaged(checkpoints: Path) -> None:
    for step in (1, 2, 3):
        os.truncate(checkpoints / f"global_step{step}" / SHARD, 10)
    with pytest.raises(CheckpointError, match="no complete checkpoint") as caught:
        find_checkpoint(checkpoints, "auto")
    assert all(f"global_step{step}" in str(caught.value) for step in (1, 2, 3))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file and its hash, as whoever may write the directory can."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "mdsp.json").read_text())
    for entry in manifest["files"]:
        if entry["file"] == name:
            entry.update(size=len(data), hash=xxhash.xxh3_128(data).hexdigest())
    (folder / "mdsp.json").write_text(json.dumps(manifest))


class Bomb:
    """An object whose unpickling leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def _resume_error(folder: str) -> str | None:
    try:
        train(Layout(), folder, 4, (), "auto")
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [SHARD, "layer_03-model_00-model_states.pt", "mp_rank_00_model_states.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(name: str, zipped: bool, checkpoints: Path, tmp_path: Path) -> None:
    trace = tmp_path / "was here"
    hostile = tmp_path / "hostile.pt"
    torch.save({"module": Bomb(trace)}, hostile, _use_new_zipfile_serialization=zipped)
    replace_file(checkpoints / "global_step3", name, hostile.read_bytes())
    with pytest.raises(CheckpointError, match="may hold code to be run"):
        read_file(checkpoints / "global_step3" / name)
    (error,) = run_ranks(_resume_error, 1, str(checkpoints))
    assert error is not None and name in error
    assert main(["checkpoint", "verify", str(checkpoints / "global_step3")]) == 2
    assert not trace.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "hf/../../secret", "a\\..\\b", ""])
@pytest.mark.parametrize("section", ["files", "hf_files"])
def test_paths_cannot_leave_the_checkpoint(name: str, section: str, checkpoints: Path) -> None:
    folder = checkpoints / "global_step3"
    (checkpoints / "secret").write_bytes(b"x")
    manifest = json.loads((folder / "mdsp.json").read_text())
    manifest[section].append({"file": name, "size": 1, "hash": xxhash.xxh3_128(b"x").hexdigest()})
    (folder / "mdsp.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="mdsp.json"):
        find_checkpoint(None, str(folder))


def test_links_cannot_leave_the_checkpoint(checkpoints: Path) -> None:
    shard = checkpoints / "global_step3" / SHARD
    shard.rename(checkpoints / "elsewhere.pt")
    shard.symlink_to(checkpoints / "elsewhere.pt")
    with pytest.raises(CheckpointError, match="link"):
        find_checkpoint(None, str(checkpoints / "global_step3"))


def test_another_model_is_refused_by_the_field() -> None:
    model = ModelConfig(n_layers=2, hidden_size=32, n_heads=4, vocab_size=100)
    path = Path("x")
    check_same_model(model, model.model_copy(update={"hidden_dropout": 0.5}), path)
    for change in ({"norm_eps": 1e-6}, {"vocab_size": 101}, {"max_positions": 2048}, {"tied_head": False}):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            check_same_model(model, model.model_copy(update=change), path)


def test_list_and_verify(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(checkpoints / "global_step2" / SHARD)
    (checkpoints / "global_step1" / "mdsp.json").unlink()
    (checkpoints / ".saving-global_step4").mkdir()
    assert main(["checkpoint", "list", str(checkpoints)]) == 0
    listed = capsys.readouterr().out
    assert "TP1 PP1 DP1" in listed and "never finished" in listed and "half written" in listed
    assert main(["checkpoint", "verify", str(checkpoints)]) == 2
    verdicts = capsys.readouterr().out.splitlines()
    assert ["whole" in verdict for verdict in verdicts] == [True, False, False]
    assert main(["checkpoint", "verify", str(checkpoints / "global_step3")]) == 0


@pytest.mark.parametrize("kind", ["truncated", "shard missing", "manifest missing", "manifest truncated"])
def test_prune_keeps_what_can_be_resumed(kind: str, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged checkpoint, or a link to one, does not count as one of those that stay."""
    DAMAGE[kind](checkpoints / "global_step3")
    (checkpoints / "global_step4").symlink_to("global_step2")
    assert main(["checkpoint", "prune", str(checkpoints), "--keep-last", "1", "--dry-run"]) == 0
    assert "would remove 1 in all" in capsys.readouterr().out
    assert main(["checkpoint", "prune", str(checkpoints), "--keep-last", "1"]) == 0
    left = ["global_step2", "global_step3", "global_step4", "latest"]
    assert sorted(path.name for path in checkpoints.iterdir()) == left
    assert find_checkpoint(None, str(checkpoints / "global_step2")) is not None


def test_prune(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoints / "global_step1_universal").mkdir()
    (checkpoints / ".trash-global_step0-1").mkdir()
    command = ["checkpoint", "prune", str(checkpoints), "--keep-last", "1", "--keep-every", "2", "--leftovers"]
    before = sorted(path.name for path in checkpoints.iterdir())
    assert main([*command, "--dry-run"]) == 0
    assert sorted(path.name for path in checkpoints.iterdir()) == before
    assert "global_step1" in capsys.readouterr().out
    assert main(command) == 0
    assert sorted(path.name for path in checkpoints.iterdir()) == ["global_step2", "global_step3", "latest"]
    assert main(["checkpoint", "prune", str(checkpoints), "--keep-last", "0"]) == 2
