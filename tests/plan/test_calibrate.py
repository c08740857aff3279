"""Calibration: after it, the run that it was made on is predicted as it was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mdsp.config.load import resolve_run_config
from mdsp.errors import MdspError
from mdsp.metrics.bubble import Parts
from mdsp.metrics.record import RunRecorder, StepRecord
from mdsp.metrics.run import read_run
from mdsp.plan.calibrate import calibrated, described
from mdsp.plan.constants import default_constants
from mdsp.plan.explain import layout_of, workload_of
from mdsp.plan.hardware import run_cluster
from mdsp.plan.layout import MDSP
from mdsp.plan.prediction import StepPrediction
from mdsp.plan.step_time import StepTime, step_time

DOCUMENT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "mdsp": {
        "model": {
            "family": "llama",
            "n_layers": 8,
            "hidden_size": 1024,
            "n_heads": 16,
            "ffn_size": 2816,
            "vocab_size": 32000,
        },
        "parallel": {"tensor": 2, "pipeline": 2},
        "data": {"seq_length": 1024},
    },
}
RUN = resolve_run_config(DOCUMENT, 8)


def _predicted() -> StepTime:
    cluster = run_cluster("NVIDIA A100-SXM4-80GB", 312e12, 8)
    return step_time(workload_of(RUN), layout_of(RUN), cluster, MDSP, default_constants().constants)


def _write(folder: Path, step_s: float, parts: Parts | None) -> str:
    info = {
        "model": RUN.model.model_dump(), "layout": asdict(RUN.layout), "precision": RUN.precision,
        "mdsp": RUN.mdsp.model_dump(),
        "peak_source": "NVIDIA A100-SXM4-80GB", "peak_flops_per_s": 312e12,
    }  # fmt: skip
    recorder = RunRecorder(folder, info)
    for step in range(1, 7):
        recorder.step(
            StepRecord(
                step=step,
                loss=1.0,
                lr=1e-4,
                step_s=step_s,
                tokens=step,
                samples=step,
                tokens_per_s=1.0,
                samples_per_s=1.0,
                bubble_parts_s=None if parts is None else parts.as_dict(),
            )
        )
    recorder.close()
    return str(folder)


def _parts(compute: float, link: float, network: float) -> Parts:
    predicted = _predicted()
    own = predicted.matrices + predicted.attention + predicted.elementwise + predicted.head + predicted.accumulate
    return Parts(compute=compute * own, tensor_parallel=link * predicted.tensor, data_parallel=network * predicted.data)


def test_the_calibrated_prediction_is_the_measured_step(tmp_path: Path) -> None:
    measured = 1.7 * _predicted().total
    for parts in (None, _parts(1.5, 2.0, 3.0)):
        folder = _write(tmp_path / str(parts is None), measured, parts)
        work, layout, cluster = described(read_run(folder))
        assert cluster.device.name == "A100"
        found = calibrated([folder])
        assert step_time(work, layout, cluster, MDSP, found.constants).total == pytest.approx(measured, rel=0.01)
        assert found.notes
        assert found.band < default_constants().band


def test_what_the_timeline_shows_slow_becomes_slow(tmp_path: Path) -> None:
    """Communication three times as slow, computation as predicted: only the link's efficiency falls by much."""
    predicted = _predicted()
    parts = _parts(1.0, 3.0, 1.0)
    found = calibrated([_write(tmp_path / "run", predicted.total + 2 * predicted.tensor, parts)]).constants
    shipped = default_constants().constants
    assert shipped.link / found.link == pytest.approx(3.0, rel=0.15)
    assert shipped.gemm_ampere / found.gemm_ampere == pytest.approx(1.0, rel=0.1)


def test_runs_without_steps_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MdspError, match="not a directory"):
        calibrated([str(tmp_path / "absent")])
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(MdspError, match="no step"):
        calibrated([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5, "step_s": 1.0}) + "\n")
    with pytest.raises(MdspError, match="does not describe"):
        calibrated([str(tmp_path)])


def test_a_training_run_prints_both() -> None:
    prediction = StepPrediction(RUN, "NVIDIA A100-SXM4-80GB", 312e12, 8)
    assert prediction.after() == ""
    assert f"{_predicted().total:.3g} s" in prediction.before()
    for seconds in (9.0, 9.0, 2.0, 2.0, 2.0):
        prediction.add(seconds)
    assert "measured step 2 s (median of 3)" in prediction.after()
    unknown = StepPrediction(RUN, "measured GEMM peak", 1e11, 8)
    assert "not in the table" in unknown.before()
