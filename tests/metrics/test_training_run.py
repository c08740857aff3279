"""A real training job of four ranks with everything switched on: what it leaves behind is complete and consistent."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mdsp.metrics.bubble import PART_NAMES
from mdsp.metrics.report import render_report
from mdsp.metrics.run import Run, read_run
from tests.faults.job import Job, write_config
from tests.metrics.browser import render
from tests.metrics.wandb_files import read_offline_wandb

STEPS, MORE = 8, 11
IN_EVERY_STEP = {
    "train/loss": "loss",
    "train/learning_rate": "lr",
    "train/grad_norm": "grad_norm",
    "train/skipped_steps": "skipped",
    "train/tokens": "tokens",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/samples_per_s": "samples_per_s",
    "speed/step_s": "step_s",
    "speed/model_tflops_causal_half": "model_tflops_per_device",
    "speed/hardware_tflops_causal_half": "hardware_tflops_per_device",
    "speed/data_wait_s": "data_s",
}
IN_SAMPLED_STEPS = {
    "bubble/measured_percent",
    *(f"bubble_parts/{name}_s" for name in PART_NAMES),
    *(f"{kind}/stage_0{stage}_{unit}" for stage in (0, 1) for kind, unit in (("stage_busy", "s"), ("memory", "gb"))),
}


def start(config: Path, *overrides: str) -> str:
    with Job(config, overrides=overrides) as job:
        assert job.wait() == 0, job.output() + job.logs()
    return job.output()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the terminal of a job that was resumed once, at the end of its first part."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = str(folder / "corpus")
    config = write_config(folder, STEPS, data={"valid": corpus}, monitor={"timeline_interval": 3})
    document: dict[str, Any] = json.loads(config.read_text())
    document["mdsp"]["train"].update(eval_interval=4, eval_batches=2)
    document["wandb"] = {"enabled": True, "project": "mdsp-test"}
    document["csv_monitor"] = {"enabled": True, "output_path": str(folder / "csv"), "job_name": "job"}
    config.write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CONSOLE", "off")):
            patch.setenv(f"WANDB_{name}", value)
        output = start(config)
        start(config, f"mdsp.train.steps={MORE}")
    return folder, output


@pytest.fixture(scope="module")
def run(trained: tuple[Path, str]) -> Run:
    return read_run(trained[0] / "run")


def test_the_run_directory_is_complete(run: Run) -> None:
    assert [row["step"] for row in run.steps] == list(range(1, MORE + 1))
    # Every third step, the second one, and the one that the checkpoint after step 4 held up.
    assert list(run.timelines) == [2, 3, 5, 6, 9]
    assert [step for step, _ in run.series("eval_loss")] == [4, 8, 11]
    assert run.info["layout"]["pipeline"] == 2
    for row in run.steps:
        assert row["tokens_per_s"] == pytest.approx(8 * 16 / row["step_s"])
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["bubble_theory"] == pytest.approx(1 / 5)
        if row["step"] in run.timelines:
            assert 0 < row["bubble_measured"] < 1
            assert len(row["memory_bytes"]) == 2
            assert min(row["memory_bytes"]) > 50e6
            held_up = row.get("checkpoint_s", 0.0)
            assert (held_up > 0) == (row["step"] == 5)
            saving = {i.stage: i.duration_s for i in run.timelines[row["step"]] if i.kind == "checkpoint"}
            assert saving.get(0, 0.0) == pytest.approx(held_up, abs=1e-6)
            assert row["bubble_parts_s"]["checkpoint"] == pytest.approx(sum(saving.values()) / 2, abs=1e-6)
            assert sum(row["bubble_parts_s"].values()) <= row["step_s"] + held_up


def test_a_timeline_has_every_instruction_of_the_schedule(run: Run) -> None:
    for instructions in run.timelines.values():
        for stage in (0, 1):
            mine = [i for i in instructions if i.stage == stage]
            counts = {kind: sum(i.kind == kind for i in mine) for kind in ("forward", "backward", "load", "optimizer")}
            assert counts == {"forward": 4, "backward": 4, "load": 4, "optimizer": 1}
            forwards = [i for i in mine if i.kind == "forward"]
            assert [i.micro_batch for i in forwards] == [0, 1, 2, 3]
        sent = {i.micro_batch: i for i in instructions if i.kind == "send_activation"}
        got = {i.micro_batch: i for i in instructions if i.kind == "recv_activation"}
        assert sorted(sent) == sorted(got) == [0, 1, 2, 3]
        # Data cannot arrive before it is sent: the ranks' clocks agree.
        assert all(got[m].end_s > sent[m].start_s for m in sent)


def test_wandb_has_every_series_and_one_chart(trained: tuple[Path, str], run: Run) -> None:
    folder, _ = trained
    files = list((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # named by the id of the run
    rows = {row["train/step"]: row for row in read_offline_wandb(folder / "run") if "train/step" in row}
    assert sorted(rows) == list(range(1, MORE + 1))
    for record in run.steps:
        row = rows[record["step"]]
        assert {key: row[key] for key in IN_EVERY_STEP} == {key: record[name] for key, name in IN_EVERY_STEP.items()}
        assert (set(row) >= IN_SAMPLED_STEPS) == (record["step"] in run.timelines)
        assert ("eval/perplexity" in row) == (record["step"] in (4, 8, 11))


def test_csv_has_the_same_numbers(trained: tuple[Path, str], run: Run) -> None:
    with (trained[0] / "csv" / "job" / "train_loss.csv").open() as file:
        written = [float(loss) for step, loss in csv.reader(file) if step != "step"]
    assert written == [row["loss"] for row in run.steps]


def test_the_terminal_has_a_line_per_step_from_one_rank(trained: tuple[Path, str], run: Run) -> None:
    lines = [line for line in trained[1].splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    for line, row in zip(lines, run.steps, strict=False):
        assert f"loss {row['loss']:.4f}" in line
    assert "DeepSpeed" not in trained[1]


def test_its_report_renders(tmp_path: Path, run: Run) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(run), encoding="utf-8")
    rendered = render(page, tmp_path / "profile")
    assert rendered.console == []
    assert f'data-key="loss"><b>{run.steps[-1]["loss"]:.4f}</b>' in rendered.dom
    measured = 100 * next(row for row in reversed(run.steps) if "bubble_measured" in row)["bubble_measured"]
    assert re.search(rf"Step 9: [\d.]+ ms, bubble {measured:.1f} % \(theory 20.0 %\)", rendered.dom)


def test_a_full_disk_does_not_stop_the_training(tmp_path: Path) -> None:
    config = write_config(tmp_path, 4, interval=0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    with Job(config, world_size=2) as job:
        assert job.wait() == 0, job.output() + job.logs()
    assert "step 4/4" in job.output()
    assert " ".join(job.output().split()).count("training goes on without its records") == 1
