"""What the planner and the commands import needs neither torch nor DeepSpeed."""

from __future__ import annotations

import subprocess
import sys

LIGHT = (
    *("flops", "devices", "theory", "timeline", "replay", "bubble", "advice", "record", "run", "series", "report"),
    *("compare", "dashboard", "trace", "terminal", "monitor"),
    *("report_command", "compare_command", "dashboard_command"),
)


def test_no_torch() -> None:
    modules = ", ".join(f"mdsp.metrics.{name}" for name in LIGHT)
    code = f"import sys, {modules}; print(sorted({{'torch', 'deepspeed', 'transformers', 'wandb'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
