"""Series arrive in real W&B (offline), TensorBoard and CSV files through DeepSpeed; failures stop nothing."""

from __future__ import annotations

import csv
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.monitor import Monitor, finish_wandb, start_wandb
from mdsp.metrics.record import StepRecord
from mdsp.metrics.series import PART_TITLES, SERIES, values
from tests.harness import run_ranks
from tests.metrics.runs import step_record, timeline, with_bubble
from tests.metrics.wandb_files import read_offline_wandb

EXPECTED = {
    "train/loss",
    "train/learning_rate",
    "train/grad_norm",
    "train/loss_scale",
    "train/skipped_steps",
    "speed/tokens_per_s",
    "speed/samples_per_s",
    "speed/step_s",
    "speed/model_tflops_causal_half",
    "speed/hardware_tflops_causal_half",
    "speed/mfu_percent",
    "speed/data_wait_s",
    "bubble/measured_percent",
    "bubble/theory_percent",
    "bubble_parts/warmup_drain_s",
    "bubble_parts/imbalance_s",
    "bubble_parts/waiting_s",
    "stage_busy/stage_00_s",
    "stage_busy/stage_01_s",
    "memory/stage_01_gb",
    "eval/loss",
    "eval/perplexity",
}


def records(first: int, last: int) -> list[StepRecord]:
    bubble = analyse_step(timeline(2, 4))
    return [with_bubble(step_record(step, eval_loss=3.0), bubble) for step in range(first, last + 1)]


def test_names_and_units() -> None:
    found = values(records(1, 1)[0].as_dict())
    assert set(found) >= EXPECTED
    assert found["eval/perplexity"] == pytest.approx(math.exp(3.0))
    assert found["speed/mfu_percent"] == pytest.approx(32.5)
    assert found["memory/stage_01_gb"] == pytest.approx(4.0)
    assert "train/loss" not in values(step_record(1, loss=float("nan")).as_dict())
    assert len({series.key for series in SERIES}) == len(SERIES)
    assert sum(series.key.startswith("bubble_parts/") for series in SERIES) == len(PART_TITLES)


def write_everywhere(folder: str, first: int, last: int, run_id: str | None) -> str:
    """One rank of a run: DeepSpeed's monitor with all three services."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")
    config: dict[str, Any] = {
        "wandb": {"enabled": True, "project": "mdsp-test"},
        "tensorboard": {"enabled": True, "output_path": f"{folder}/tb", "job_name": "job"},
        "csv_monitor": {"enabled": True, "output_path": f"{folder}/csv", "job_name": "job"},
    }
    start_wandb(config["wandb"], folder, {"layout": {"pipeline": 2}}, enabled=True, run_id=run_id)
    import wandb

    name = wandb.run.id
    master = MonitorMaster(get_monitor_config(config))
    monitor = Monitor(master)
    for record in records(first, last):
        # DeepSpeed's engine writes its own events at the same number of samples, before ours.
        master.write_events([("Train/Samples/train_loss", record.loss, record.samples)])
        monitor.step(record)
    assert wandb.run.id == name
    finish_wandb()
    return name


def test_three_services_get_every_series_and_a_restart_continues_the_run(tmp_path: Path) -> None:
    name = run_ranks(write_everywhere, 1, str(tmp_path), 1, 3, None)[0]
    assert run_ranks(write_everywhere, 1, str(tmp_path), 4, 5, name)[0] == name

    rows = read_offline_wandb(tmp_path)
    assert [row["train/step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["_step"] for row in rows] == [8, 16, 24, 32, 40]
    for row, record in zip(rows, records(1, 5), strict=True):
        assert set(row) >= EXPECTED
        assert row["train/loss"] == record.loss
        assert row["Train/Samples/train_loss"] == record.loss
        assert row["bubble/measured_percent"] == pytest.approx(100 * 1 / 5, rel=0.01)

    board = EventAccumulator(str(tmp_path / "tb" / "job"))
    board.Reload()
    assert set(board.Tags()["scalars"]) >= EXPECTED
    losses = board.Scalars("train/loss")
    assert [event.step for event in losses] == [8, 16, 24, 32, 40]
    assert [event.value for event in losses] == pytest.approx([r.loss for r in records(1, 5)], rel=1e-6)

    with (tmp_path / "csv" / "job" / "train_loss.csv").open() as file:
        written = [row for row in csv.reader(file) if row[0] != "step"]
    assert [(int(step), float(loss)) for step, loss in written] == [(r.samples, r.loss) for r in records(1, 5)]


class Failing:
    calls = 0

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        self.calls += 1
        raise RuntimeError("no network")


def test_a_failing_service_is_warned_about_once_and_silences_no_other(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    class Working:
        def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
            seen.append(event_list[0][2])

    class Master:
        tb_monitor = Failing()
        wandb_monitor = Working()
        csv_monitor = None

        def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
            raise AssertionError("the services are asked one by one")

    monitor = Monitor(Master())
    with caplog.at_level(logging.WARNING, logger="mdsp"):
        for record in records(1, 3):
            monitor.step(record)
    assert seen == [8, 16, 24]
    assert Master.tb_monitor.calls == 3
    assert [r.message for r in caplog.records] == ["Failing failed (RuntimeError: no network); training goes on"]


def test_without_a_monitor_nothing_happens() -> None:
    Monitor(None).step(step_record(1))


def start_without_a_network(folder: str) -> str:
    """W&B set to talk to a server that does not exist: a run must start all the same."""
    os.environ.update(
        WANDB_MODE="online",
        WANDB_SILENT="true",
        WANDB_API_KEY="0" * 40,
        WANDB_BASE_URL="http://127.0.0.1:9",
        WANDB_INIT_TIMEOUT="3",
    )
    section = start_wandb({"enabled": True, "project": "mdsp-test"}, folder, {}, enabled=True)
    monitor = Monitor(MonitorMaster(get_monitor_config({"wandb": section})))
    monitor.step(step_record(1))
    finish_wandb()
    return str(section["enabled"])


def test_without_a_network_the_run_is_kept_on_disk(tmp_path: Path) -> None:
    assert run_ranks(start_without_a_network, 1, str(tmp_path)) == ["True"]
    assert [row["train/loss"] for row in read_offline_wandb(tmp_path)] == [step_record(1).loss]


def start_without_wandb(folder: str) -> bool:
    sys.modules["wandb"] = None  # type: ignore[assignment]  # what an import finds where it is not installed
    section = start_wandb({"enabled": True, "project": "mdsp-test"}, folder, {}, enabled=True)
    Monitor(MonitorMaster(get_monitor_config({"wandb": section}))).step(step_record(1))
    finish_wandb()
    return bool(section["enabled"])


def test_without_wandb_the_run_goes_on(tmp_path: Path) -> None:
    assert run_ranks(start_without_wandb, 1, str(tmp_path)) == [False]
