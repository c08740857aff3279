"""`mdsp plan` as people use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mdsp.cli import main
from mdsp.config.load import load_run_config

GPT3 = ["plan", "--model", "gpt3-175b", "--cluster", "128x8xH100", "--global-batch", "1536", "--seq", "2048"]


def test_worked_example_comes_out_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "530B", "--cluster", "128x8xA100", "--global-batch", "1024", "--seq", "2048",
                 "--precision", "fp16",
                 "--tensor", "8", "--pipeline", "16", "--micro-batch", "1"]) == 0  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "weights in fp16: 1,060 GB, at least 14 devices of 80 GB",
        "8,480 GB, at least 106 devices",
        "1,024 = 8 x 16 x 8",
        "48.4 % at 16",
        "10.5 % at 128",
    ):
        assert words in printed


@pytest.mark.parametrize("width", ["80", "120"])
def test_output_keeps_to_the_terminal(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main([*GPT3, "--tokens", "300e9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(width)
    assert not any("…" in line for line in lines)
    assert any("not chosen" in line for line in lines)
    assert any(line.startswith("step ") for line in lines)


def test_json_and_written_configuration_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT3, "--json", "--tokens", "300e9", "--top", "4", "--write", str(tmp_path / "best.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 1024
    assert len(found["layouts"]) == 4
    best = found["layouts"][0]
    assert best["step_low_s"] < best["step_s"] < best["step_high_s"]
    assert sum(best["step_parts_s"].values()) == pytest.approx(best["step_s"])
    assert best["days"] * 24 * 1024 == pytest.approx(best["device_hours"])
    assert len(found["stages"]) == best["pipeline"]
    run = load_run_config(tmp_path / "best.json", [], 1024)
    assert (run.layout.tensor, run.layout.pipeline, run.layout.data) == (best["tensor"], best["pipeline"], best["data"])
    assert run.layout.global_batch == 1536
    assert run.mdsp.data.seq_length == 2048
    assert run.precision == "bf16"


def test_explain_says_what_each_rank_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT3, "--json", "--write", str(tmp_path / "best.json")]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    explain = ["plan", "--explain", str(tmp_path / "best.json"), "--cluster", "128x8xH100"]
    assert main([*explain, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["step_s"] == pytest.approx(best["step_s"])
    assert found["layout"]["memory_bytes"] == pytest.approx(best["memory_bytes"])
    assert found["better"] == []
    document = json.loads((tmp_path / "best.json").read_text())
    document["mdsp"]["train"]["recompute"] = "full"
    (tmp_path / "slow.json").write_text(json.dumps(document))
    assert main(["plan", "--explain", str(tmp_path / "slow.json"), "--cluster", "128x8xH100"]) == 0
    assert "nearest better layouts" in capsys.readouterr().out


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "--model", "gpt3-6.7b", "--cluster", "1x8xA100", "--global-batch", "64", "--seq", "2048"]
    assert main([*small, "--plot", str(tmp_path / "plan.png")]) == 0
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > 800
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50
    assert main([*small, "--plot", str(tmp_path / "plan.html")]) == 0
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    assert "Pareto front" in page
    assert capsys.readouterr().out.count("picture written to") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--model", "gpt2"], "needs --cluster, --global-batch, --seq"),
        ([*GPT3[:3], "--cluster", "128xH", *GPT3[5:]], "unknown device 'H'"),
        ([*GPT3[:3], "--cluster", "lots", *GPT3[5:]], "not understood"),
        ([*GPT3[:3], "--cluster", "9" * 20 + "x8xH100", *GPT3[5:]], "at most 10,000,000 can be planned"),
        (["plan", "--model", "0B", *GPT3[3:]], "a model has parameters"),
        ([*GPT3[:3], "--cluster", "2x8xH100", *GPT3[5:]], "it would fit with"),
        ([*GPT3, "--tensor", "5"], "must divide 96 heads"),
        ([*GPT3[:7], "--seq", "4096"], "2048 learned positions"),
        ([*GPT3, "--tokens", "-3"], "--tokens"),
        ([*GPT3, "--plot", "x.gif"], "must end in .png or .html"),
        (["plan", "--explain", "x.json"], "also needs --cluster"),
        ([*GPT3[:3], "--cluster", "1x8xV100", *GPT3[5:], "--precision", "bf16"], "no bf16"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_message(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message


def test_custom_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps({"nodes": 2, "devices_per_node": 4, "device": {"base": "H100", "name": "big", "memory_gb": 160}})
    )
    arguments = [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        str(path),
        "--global-batch",
        "64",
        "--seq",
        "4096",
        "--json",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["cluster"]["device"]
    assert (found["name"], found["memory_bytes"]) == ("big", 160e9)
    path.write_text(json.dumps({"nodes": 2, "devices_per_node": 4, "device": {"base": "H100", "memory": 160}}))
    assert main(arguments) == 2
    assert "unknown device field 'memory'" in capsys.readouterr().err


def test_the_list_names_models_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in ("llama3-405b", "mt-nlg-530b", "MI300X", "GB200"):
        assert name in printed


def test_planning_imports_neither_torch_nor_deepspeed() -> None:
    """In a process of its own: help needs not even pydantic."""
    run = "import sys; from mdsp.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    code = run + "print(*sys.modules)"
    for arguments, absent in (
        (["plan", "--help"], {"torch", "deepspeed", "pydantic", "numpy"}),
        ([*GPT3, "--json"], {"torch", "deepspeed"}),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert not absent & set(done.stdout.splitlines()[-1].split())
