"""When a run saves, and which checkpoints stay."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdsp.checkpoint.counters import Counters
from mdsp.checkpoint.resume import find_checkpoint
from mdsp.errors import CheckpointError
from tests.checkpoint.jobs import GLOBAL_BATCH, Layout, micro_batches, run_config
from tests.harness import run_ranks


def scheduled(
    directory: str | None,
    settings: dict[str, Any],
    steps: int,
    signal_at: int = 0,
    tokenizer: str | None = None,
    vanishes_after: int = 0,
) -> tuple[list[str], str | None, int]:
    """(what was noted, why it stopped, steps made); rank 1 gets a signal in step `signal_at`, and the tokenizer is
    removed after step `vanishes_after`."""
    import torch.distributed as dist

    from mdsp.checkpoint.schedule import Checkpoints
    from mdsp.engine.build import build_engine

    run = run_config(Layout(data=2), {**settings, "dir": directory})
    data = run.mdsp.data.model_copy(update={"tokenizer": tokenizer})
    run = replace(run, mdsp=run.mdsp.model_copy(update={"data": data}))
    engine = build_engine(run)
    notes: list[str] = []
    checkpoints = Checkpoints(engine, run, Path(directory) if directory else None, notes.append)
    counters, stop = Counters(), None
    while counters.step < steps and stop is None:
        engine.train_batch(micro_batches(engine, counters.samples))
        counters = replace(counters, step=counters.step + 1, samples=counters.samples + GLOBAL_BATCH)
        if counters.step == signal_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stop = checkpoints.after_step(counters, last=counters.step == steps)
        if counters.step == vanishes_after and dist.get_rank() == 0 and tokenizer is not None:
            shutil.rmtree(tokenizer)
    checkpoints.close()
    return notes, stop, counters.step


def refused(directory: str, tokenizer: str) -> str:
    """Why a run with this tokenizer does not start."""
    try:
        scheduled(directory, {}, 0, 0, tokenizer)
    except CheckpointError as error:
        return str(error)
    return "it starts"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name not in ("latest", ".lock"))


@pytest.mark.parametrize("background", [False, True])
def test_every_n_steps_at_the_end_and_what_stays(background: bool, tmp_path: Path) -> None:
    """Steps 2, 4, 6, 8 and the last, 9, are saved; the newest two and multiples of 4 stay."""
    settings = {"interval": 2, "keep_last": 2, "keep_every": 4, "background": background}
    (tmp_path / ".saving-global_step1").mkdir()
    results = run_ranks(scheduled, 2, str(tmp_path), settings, 9)
    assert names(tmp_path) == ["global_step4", "global_step8", "global_step9"]
    assert (tmp_path / "latest").read_text() == "global_step9"
    for step in (4, 8, 9):
        assert find_checkpoint(None, str(tmp_path / f"global_step{step}")) is not None
    said = " ".join(results[0][0])
    assert all(f"global_step{step} (training stood still" in said for step in (2, 4, 6, 8, 9))
    assert "an interrupted run left behind" in said


def test_checkpoints_of_another_run_do_not_displace_those_of_this_one(tmp_path: Path) -> None:
    run_ranks(scheduled, 2, str(tmp_path), {"interval": 1}, 5)
    results = run_ranks(scheduled, 2, str(tmp_path), {"interval": 1, "keep_last": 2}, 3)
    assert names(tmp_path) == [f"global_step{step}" for step in (2, 3, 4, 5)]
    assert "global_step5 is of another run, beyond step 0" in " ".join(results[0][0])


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_tokenizer_that_is_none_is_refused_before_the_first_step(kind: str, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    if kind == "empty":
        tokenizer.mkdir()
    elif kind == "file":
        tokenizer.write_text("{}")
    for message in run_ranks(refused, 2, str(tmp_path / "checkpoints"), str(tokenizer)):
        assert message.startswith(f"mdsp.data.tokenizer = {tokenizer} ")


def test_a_tokenizer_that_vanishes_costs_no_checkpoint(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    results = run_ranks(scheduled, 2, str(tmp_path / "checkpoints"), {"interval": 1}, 2, 0, str(tokenizer), 1)
    assert names(tmp_path / "checkpoints") == ["global_step1", "global_step2"]
    assert (tmp_path / "checkpoints/global_step1/hf/tokenizer.json").is_file()
    assert find_checkpoint(None, str(tmp_path / "checkpoints/global_step2")) is not None
    assert "warning: mdsp.data.tokenizer" in " ".join(results[0][0])


def test_only_at_the_end(tmp_path: Path) -> None:
    run_ranks(scheduled, 2, str(tmp_path), {}, 3)
    assert names(tmp_path) == ["global_step3"]


def test_every_so_many_minutes(tmp_path: Path) -> None:
    """A limit that every step exceeds."""
    run_ranks(scheduled, 2, str(tmp_path), {"minutes": 1e-6}, 3)
    assert names(tmp_path) == ["global_step1", "global_step2", "global_step3"]


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_to_one_rank_stops_all(saves: bool, tmp_path: Path) -> None:
    results = run_ranks(scheduled, 2, str(tmp_path) if saves else None, {"background": True}, 9, 4)
    for _, stop, steps in results:
        assert steps == 4
        assert stop is not None and stop.startswith("SIGTERM received: training stops after step 4")
        assert ("checkpoint saved" in stop) == saves
    assert names(tmp_path) == (["global_step4"] if saves else [])
