"""The terminal view on a real pseudo-terminal, and plain lines everywhere else."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace

import pytest

from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.terminal import Terminal, duration, sparkline
from tests.metrics.runs import step_record, timeline, with_bubble


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, "gpt2", total_steps=7, log_interval=3)
    terminal.begin()
    for step in range(1, 8):
        terminal.step(step_record(step, eval_loss=2.5 if step == 5 else None))
    terminal.note("saved [step 7]")
    terminal.end()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["step 3/7", "step 5/7", "step 6/7", "step 7/7"]
    assert lines[1] == (
        f"step 5/7  loss {step_record(5).loss:.4f}  held-out 2.5000  lr 3.00e-04  grad norm 1.200  6,554 tokens/s  "
        f"102 TFLOP/s per device  ETA 0:02"
    )
    assert lines[-1] == "saved [step 7]"


def test_other_ranks_show_nothing() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, "gpt2", 3, enabled=False)
    terminal.begin()
    terminal.step(step_record(1))
    terminal.note("anything")
    terminal.end()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stages", [4, 16])
def test_a_terminal_gets_a_live_view(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("LINES", "40")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        terminal = Terminal(stream, "gpt2 1.0 M parameters", 20)
        terminal.begin()
        terminal.step(step_record(1))
        terminal.note("warning: a note")
        bubble = analyse_step(timeline(stages, 2 * stages))
        terminal.step(replace(with_bubble(step_record(20), bubble), eval_loss=2.75, skipped=3))
        terminal.end()
        stream.write("\0")
        stream.flush()
        received = b""
        while not received.endswith(b"\0"):
            received += os.read(master, 4096)
    os.close(master)
    shown = received.decode()
    assert "\x1b[" in shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "warning: a note" in text
    final = text[text.rindex("gpt2 1.0 M parameters") :]
    theory = 100 * (stages - 1) / (3 * stages - 1)
    for expected in (
        "step 20/20   ETA 0:00",
        f"{step_record(20).loss:.4f}",
        "2.7500 (step 20)",
        "6,554 tokens/s",
        "102 TFLOP/s per device, MFU 32.5 %",
        f"{theory:.1f} % (theory {theory:.1f} %), step 20",
    ):
        assert expected in final
    assert ("stage 3" in final) == (stages == 4)
    assert ("per stage" in final) == (stages == 16)


def test_the_remaining_time_ignores_one_slow_step() -> None:
    terminal = Terminal(io.StringIO(), "gpt2", 110)
    for step in range(1, 11):
        terminal.step(step_record(step, step_s=60.0 if step == 4 else 2.0))
    assert terminal.remaining_s(step_record(10)) == 200.0


def test_sparkline_and_duration() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 3) == "▁▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert [duration(s) for s in (3, 75, 3723)] == ["0:03", "1:15", "1:02:03"]
