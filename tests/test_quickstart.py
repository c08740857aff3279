"""The quickstart, as a new user runs it: real text, real launcher, eight ranks, export, plain transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
STEPS = 12


def test_quickstart_trains_exports_and_samples(tmp_path: Path) -> None:
    settings = [f"mdsp.train.steps={STEPS}", "mdsp.train.schedule.warmup=4", "mdsp.train.eval_interval=12"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        ["bash", "launch/quickstart.sh", *overrides],
        cwd=REPOSITORY,
        env={**os.environ, "MDSP_RUN_DIR": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[0]["bubble_theory"] == (2 - 1) / (8 + 2 - 1)
    assert any(0 < row["bubble_measured"] < 1 for row in steps if "bubble_measured" in row)
    assert steps[-1]["eval_loss"] < steps[0]["loss"]

    # One rank speaks: every step is printed once, and no other rank or library adds to it.
    assert done.stdout.count(f"step {STEPS}/{STEPS} ") == 1
    assert "Traceback" not in done.stdout + done.stderr
    for what in ("layout", "entropy of single tokens", "bubble, theory", "11.1 %", "Hugging Face model"):
        assert what in done.stdout
    assert "def __init__(self" in done.stdout
    assert len(list((tmp_path / "logs").glob("rank_*.log"))) == 8
