"""The run directory: what is written can be read back, survives a kill and a resume, and a bad disk stops nothing."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import pytest

from mdsp.errors import MdspError
from mdsp.metrics.record import METRICS_FILE, TIMELINE_FILE, RunRecorder
from mdsp.metrics.run import read_run
from tests.metrics.runs import step_record, timeline, write_run


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.name == "run"
    assert run.info["parameters"] == 123_456_789
    assert [row["step"] for row in run.steps] == list(range(1, 31))
    assert run.steps[6]["loss"] == step_record(7).loss
    assert "eval_loss" not in run.steps[6]
    assert [step for step, _ in run.series("eval_loss")] == [15, 30]
    assert list(run.timelines) == [10, 20, 30]
    written = sorted(timeline(4, 8), key=lambda i: (i.stage, i.start_s))
    found = sorted(run.timelines[20], key=lambda i: (i.stage, i.start_s))
    assert [(i.stage, i.kind, i.micro_batch) for i in found] == [(i.stage, i.kind, i.micro_batch) for i in written]
    assert [i.end_s for i in found] == pytest.approx([i.end_s for i in written], abs=1e-6)
    assert run.events[-1]["kind"] == "checkpoint"


def test_timelines_of_a_long_run_take_bounded_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdsp.metrics.record.MAX_TIMELINE_BYTES", 40_000)
    recorder = RunRecorder(tmp_path, {})
    sizes = []
    for step in range(1, 201):
        recorder.step(step_record(step))
        recorder.timeline(step, timeline(2, 4))
        sizes.append((tmp_path / TIMELINE_FILE).stat().st_size)
        assert next(reversed(read_run(tmp_path).timelines)) == step
    recorder.close()
    assert 10_000 < max(sizes) <= 40_000
    kept = list(read_run(tmp_path).timelines)
    assert kept[0] < 100  # not only the newest
    assert len(read_run(tmp_path).steps) == 200
    assert {path.name for path in tmp_path.iterdir()} == {TIMELINE_FILE, METRICS_FILE, "run.json"}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "run", {}, enabled=False)
    recorder.step(step_record(1))
    recorder.timeline(1, timeline(2, 2))
    recorder.event("checkpoint", 1)
    recorder.close()
    assert not (tmp_path / "run").exists()


def test_a_kill_costs_at_most_the_line_that_was_being_written(tmp_path: Path) -> None:
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        recorder = RunRecorder(tmp_path, {})
        for step in range(1, 10**9):
            recorder.step(step_record(step))
            if step == 50:
                os.write(told, b"x")
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    steps = [row["step"] for row in read_run(tmp_path).steps]
    assert len(steps) >= 50
    assert steps == list(range(1, len(steps) + 1))


def test_a_torn_line_is_skipped_and_a_resumed_run_continues_after_it(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-25])
    assert [row["step"] for row in read_run(tmp_path).steps] == list(range(1, 20))
    recorder = RunRecorder(tmp_path, {"name": "again"})
    for step in (18, 19, 20, 21):
        recorder.step(step_record(step, loss=float(step)))
    recorder.close()
    run = read_run(tmp_path)
    assert [row["step"] for row in run.steps] == list(range(1, 22))
    assert [row["loss"] for row in run.steps[-4:]] == [18.0, 19.0, 20.0, 21.0]
    assert run.name == "again"


def test_a_fresh_start_in_the_same_directory_replaces_the_earlier_run(tmp_path: Path) -> None:
    write_run(tmp_path, steps=30)
    recorder = RunRecorder(tmp_path, {"name": "second"})
    for step in range(1, 13):
        recorder.step(step_record(step, loss=float(step)))
        if step == 5:
            recorder.timeline(step, timeline(2, 2))
    recorder.close()
    run = read_run(tmp_path)
    assert [value for _, value in run.series("loss")] == [float(step) for step in range(1, 13)]
    assert list(run.timelines) == [5]


def test_numbers_that_are_none_are_strict_json(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {})
    recorder.step(step_record(1, loss=float("nan"), grad_norm=float("inf")))
    recorder.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    assert row["loss"] is None
    assert read_run(tmp_path).series("loss") == []


def test_a_full_disk_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    recorder = RunRecorder(tmp_path, {})
    with caplog.at_level(logging.WARNING, logger="mdsp"):
        for step in range(1, 4):
            recorder.step(step_record(step))
        recorder.timeline(3, timeline(2, 2))
        recorder.close()
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1
    assert (tmp_path / TIMELINE_FILE).exists()


def test_a_directory_that_cannot_be_made_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="mdsp"):
        recorder = RunRecorder(tmp_path / "file" / "run", {})
        recorder.step(step_record(1))
        recorder.close()
    assert len(caplog.records) == 1


def test_reading_something_else_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(MdspError, match="is not a directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(MdspError, match=r"neither run\.json nor metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(MdspError, match="damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"layout": 5}', '{"deepspeed": []}', '{"parameters": "many"}'])
def test_a_description_by_another_program_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(MdspError, match=r"run\.json is not of mdsp: "):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "instructions", ['[[0, 0, "forward", 0, 1, 2]]', "[[0, 0, 999, 0, 1, 2]]", "[[0]]", "5", "[5]", "null", "[]"]
)
def test_a_timeline_by_another_program_is_skipped(instructions: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "timeline.jsonl").write_text(f'{{"step": 1, "instructions": {instructions}}}\n')
    run = read_run(tmp_path)
    assert run.series("loss") == [(1, 2.0)]
    assert run.timelines == {}
