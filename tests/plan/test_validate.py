"""The validator: every row appears in the documented format, statistics are right, reasons are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdsp.plan.constants import default_constants
from mdsp.plan.validate import main, percentile, predict_row, regret, sweeps

FILE = Path(__file__).parent / "data/published_rows.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]


def _row(start: str) -> dict[str, Any]:
    return json.loads(json.dumps(next(row for row in ROWS if row["id"].startswith(start))))


def test_output_has_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(FILE), "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    keys = {"id", "predicted_s", "low_s", "high_s", "measured_s", "predicted_gb", "measured_gb", "skipped"}
    band = default_constants().band
    for row in rows:
        assert set(row) == keys
        if row["skipped"] is None:
            assert row["low_s"] * (1 + band) == pytest.approx(row["predicted_s"])
            assert row["high_s"] / (1 + band) == pytest.approx(row["predicted_s"])
        else:
            assert row["predicted_s"] is None
    printed = capsys.readouterr().out
    for row in rows:
        if row["skipped"]:
            assert f"{row['id']}: {row['skipped']}" in printed
    assert "median" in printed
    assert "regret" in printed
    assert "out of" not in printed


def test_measured_times_are_printed_ones_or_follow_from_throughput() -> None:
    assert predict_row(_row("korthikanti22-t5")).measured_s == 13.75
    zero_bubble = _row("zb24-t4-6.2B-m32-1F1B")
    assert predict_row(zero_bubble).measured_s == pytest.approx(96 / (3.7 * 8), rel=1e-3)
    del zero_bubble["derived"]
    assert predict_row(zero_bubble).measured_s == pytest.approx(96 / (3.7 * 8))


@pytest.mark.parametrize(
    ("section", "key", "value", "reason"),
    [
        ("model", "n_experts", 8, "mixture of experts"),
        ("hardware", "gpu", "TPU v4", "unknown device 'TPU v4'"),
        ("hardware", "gpus", None, "number of devices"),
        ("layout", "gbs", None, "global batch"),
        ("layout", "tp", 7, "not a multiple"),
        ("model", "heads", 97, "not a multiple of 97 heads"),
        ("model", "layers", 4, "fewer than PP"),
    ],
)
def test_rows_beyond_knowledge_are_skipped_with_the_reason(section: str, key: str, value: object, reason: str) -> None:
    row = _row("korthikanti22-t5")
    row[section][key] = value
    found = predict_row(row)
    assert found.predicted_s is None
    assert found.skipped is not None
    assert reason in found.skipped


def test_rows_that_are_no_rows_are_skipped() -> None:
    damaged: list[dict[str, Any]] = [
        {},
        {"id": "x", "model": 3},
        {"id": "y", "source": None, "model": {}, "hardware": {}, "layout": {}},
    ]
    for row in damaged:
        assert predict_row(row).skipped


def test_bad_files_end_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\nnot json\n')
    assert main([str(tmp_path / "bad.jsonl")]) == 2
    assert "line 2" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.jsonl")]) == 2


def test_regret_by_hand() -> None:
    """Three layouts of one model, measured 10, 11 and 12 s: picking the second costs 10 %."""
    rows = []
    for pipeline, measured in ((8, 10.0), (4, 11.0), (2, 12.0)):
        row = _row("korthikanti22-t5")
        row["id"], row["layout"]["pp"], row["layout"]["vpp"], row["result"]["iter_s"] = (
            str(pipeline),
            pipeline,
            1,
            measured,
        )
        rows.append(predict_row(row))
    (group,) = sweeps(rows)
    wanted = {8: 3.0, 4: 1.0, 2: 2.0}
    assert regret(group, lambda run: wanted[run.layout.pipeline]) == pytest.approx(0.1)


def test_percentile() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert percentile([3.0], 0.9) == 3.0
