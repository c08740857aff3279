"""The report page in a real browser: it renders without a console message, and its numbers are the run's."""

from __future__ import annotations

import argparse
import html
import json
import re
from pathlib import Path

import pytest

from mdsp.errors import ConfigError
from mdsp.metrics import report_command
from mdsp.metrics.report import render_report, thin
from mdsp.metrics.run import read_run
from mdsp.metrics.timeline import KINDS
from tests.metrics.browser import render
from tests.metrics.runs import step_record, timeline, write_run


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report_command.configure(parser)
    return parser.parse_args(words)


def report(run: Path, *options: str) -> Path:
    assert report_command.main(arguments(str(run), *options)) == 0
    return run / "report.html"


def tile(dom: str, key: str) -> str:
    found = re.search(rf'data-key="{key}"><b>([^<]*)</b>', dom)
    assert found is not None, f"there is no tile {key}"
    return found[1]


def test_the_browser_reports_console_errors(tmp_path: Path) -> None:
    """The check of the other tests can fail: a broken page is seen to be broken."""
    page = tmp_path / "broken.html"
    page.write_text("<script>undefinedFunction()</script>")
    assert any("undefinedFunction" in line for line in render(page, tmp_path / "profile").console)


@pytest.mark.parametrize(("stages", "micro_batches", "theme"), [(8, 16, "light"), (64, 32, "dark")])
def test_the_page_renders_and_its_numbers_are_the_runs(
    tmp_path: Path, stages: int, micro_batches: int, theme: str
) -> None:
    run = write_run(tmp_path / "run", stages, micro_batches, slow=2, every=15)
    page = report(run)
    options = ("--blink-settings=preferredColorScheme=0",) if theme == "dark" else ()
    rendered = render(page, tmp_path / "profile", *options)
    dom = rendered.dom
    assert rendered.console == []
    assert 'data-ready="yes"' in dom
    assert f'data-theme="{theme}"' in dom

    last = step_record(30)
    assert tile(dom, "steps") == "30"
    assert tile(dom, "loss") == f"{last.loss:.4f}"
    assert tile(dom, "eval_loss") == f"{last.loss + 0.1:.4f}"
    assert tile(dom, "tokens") == "245,760"
    assert tile(dom, "model_tflops_per_device") == "102"
    assert tile(dom, "mfu") == "32.5"
    # Independent of the analysis: busy time and window straight from the simulated instructions.
    instructions = timeline(stages, micro_batches, slow=2)
    passes = [i for i in instructions if i.kind in ("forward", "backward")]
    window = max(i.end_s for i in passes)
    busy = [sum(i.end_s - i.start_s for i in passes if i.stage == stage) for stage in range(stages)]
    bubble = 100 * (1 - sum(busy) / stages / window)
    assert tile(dom, "bubble_measured") == f"{bubble:.1f}"
    theory = 100 * (stages - 1) / (micro_batches + stages - 1)
    assert tile(dom, "bubble_theory") == f"{theory:.1f}"
    length = max(i.end_s for i in instructions)
    assert f"Step 30: {1e3 * length:.1f} ms, bubble {bubble:.1f} % (theory {theory:.1f} %)" in dom

    charts = re.findall(r'data-chart="(\w+)"', dom)
    assert charts == ["loss", "lr", "tflops", "mfu", "bubble", "tokens", "grad_norm", "parts"]
    drawn = re.search(r'<canvas[^>]*data-drawn="(\d+)"', dom)
    assert drawn is not None
    assert int(drawn[1]) == sum(1 for i in instructions if i.end_s - i.start_s > 1e-6)
    rows = re.findall(r'<tr data-stage="(\d+)"><td>\d+</td><td>(\d+)</td><td>([\d.]+)</td><td>([\d.]+)</td>', dom)
    assert [int(row[0]) for row in rows] == list(range(stages))
    assert [row[1] for row in rows] == ["3"] * stages
    assert [row[2] for row in rows] == [f"{1e3 * b:.1f}" for b in busy]
    assert [row[3] for row in rows] == [f"{100 * (1 - b / window):.1f}" for b in busy]
    assert "&lt;cpu&gt; &amp; more" in dom


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = render_report(read_run(write_run(tmp_path / "run")))
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "@import" not in text
    assert "fetch(" not in text


PROBE = """<script>
const canvas = document.getElementById("gantt"), box = canvas.getBoundingClientRect();
const point = (x, y) => ({ clientX: box.left + x, clientY: box.top + y, bubbles: true });
const wide = box.width - 64, step = data.timelines[data.timelines.length - 1];
const row = step.instructions.find((r) => r[0] === 1 && data.kinds[r[2]].name === "backward" && r[3] === 2);
canvas.dispatchEvent(new MouseEvent("mousemove", point(64 + wide * (row[4] + row[5]) / 2 / step.length_s, 40)));
document.body.dataset.hover = document.getElementById("tip").textContent;
document.getElementById("in").click();
document.body.dataset.zoomed = canvas.dataset.drawn;
document.getElementById("theme").click();
document.body.dataset.theme = document.documentElement.dataset.theme;
</script>"""


def test_hover_zoom_and_theme(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", stages=4, micro_batches=8))
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    rendered = render(page, tmp_path / "profile")
    assert rendered.console == []
    hover = re.search(r'data-hover="([^"]*)"', rendered.dom)
    assert hover is not None
    instruction = next(i for i in timeline(4, 8) if (i.stage, i.kind, i.micro_batch) == (1, "backward", 2))
    assert html.unescape(hover[1]) == (
        f"backward, micro-batch 2\n20.00 ms from {1e3 * instruction.start_s:.2f} ms\nstage 1, rank 1"
    )
    zoomed = re.search(r'data-zoomed="(\d+)"', rendered.dom)
    assert zoomed is not None
    assert 0 < int(zoomed[1]) < len(timeline(4, 8))
    assert "<body data-hover" in rendered.dom
    assert re.search(r'<body[^>]*data-theme="dark"', rendered.dom)


def test_a_run_that_has_just_started_renders(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", steps=1))
    rendered = render(page, tmp_path / "profile")
    assert rendered.console == []
    assert 'data-ready="yes"' in rendered.dom
    assert "gantt" not in re.sub(r"<(script|style).*?</\1>", "", rendered.dom, flags=re.DOTALL)


def test_text_of_the_run_cannot_become_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    info["name"] = "</script><script>alert(1)</script>"
    (run / "run.json").write_text(json.dumps(info))
    rendered = render(report(run), tmp_path / "profile")
    assert rendered.console == []
    assert "<script>alert(1)" not in rendered.dom


def test_the_trace_holds_every_instruction(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    report(run, "--trace", str(tmp_path / "trace.json"), "--steps", "20")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    written = timeline(4, 8)
    assert len(spans) == len(written)
    assert {event["pid"] for event in spans} == {20}
    assert sorted({event["cat"] for event in spans}) == sorted({i.kind for i in written})
    assert {event["cat"] for event in spans} <= set(KINDS)
    total = sum(event["dur"] for event in spans)
    assert total == pytest.approx(1e6 * sum(i.end_s - i.start_s for i in written), rel=1e-4)
    assert min(event["ts"] for event in spans) == 0


def test_a_step_without_a_timeline_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="the sampled steps are 10, 20, 30"):
        report_command.main(arguments(str(run), "--steps", "11"))


def test_thinning_keeps_peaks_and_ends() -> None:
    points = [(step, float(step % 7)) for step in range(10_000)]
    points[4321] = (4321, 99.0)
    points[8765] = (8765, -99.0)
    kept = thin(points, 500)
    assert len(kept) <= 500
    assert {points[0], points[-1], points[4321], points[8765]} <= set(kept)
    assert kept == sorted(kept)
