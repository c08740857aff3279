"""A page in a real headless Chromium: its document after its scripts have run, and what its console said."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rendered:
    dom: str
    console: list[str]


def find_chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    raise AssertionError("this test needs Chromium: apt-get install chromium")


def render(path: Path, profile: Path, *options: str) -> Rendered:
    """Open a file, run its scripts for some seconds of the page's own time, and read the document back."""
    command = [
        find_chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        "--window-size=1280,1600",
        "--virtual-time-budget=5000",
        *options,
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Rendered(done.stdout, [line for line in done.stderr.splitlines() if re.search(r"\bCONSOLE\b", line)])
