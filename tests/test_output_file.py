"""What a command writes with `-o`: all of it, or what was there before."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from mdsp.cli import main
from mdsp.output_file import write_output
from tests.metrics.runs import write_run


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For every command that writes one."""
    run = str(write_run(tmp_path / "run"))
    old = tmp_path / "old.html"
    plan = ["plan", "--model", "7B", "--cluster", "1x8xA100", "--global-batch", "64", "--seq", "2048"]
    commands = [
        ["report", run, "-o", str(old)],
        ["compare", run, run, "-o", str(old)],
        ["dashboard", run, "--project", "p", "-o", str(old)],
        [*plan, "--write", str(old)],
        [*plan, "--plot", str(old)],
    ]
    for command in commands:
        old.write_text("what was there")
        child = os.fork()
        if child == 0:
            code = 99
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
                code = main(command)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, command
        said = capfd.readouterr().err
        assert said.startswith("mdsp: error: File too large: "), said
        assert old.read_text() == "what was there", command
    assert {path.name for path in tmp_path.iterdir()} == {"run", "old.html"}


def test_links_pipes_and_devices(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)

    before = (tmp_path / "target").stat().st_ino
    with (tmp_path / "target").open("w") as redirected:
        write_output(Path(f"/dev/fd/{redirected.fileno()}"), "as of a shell's >")
    assert (tmp_path / "target").stat().st_ino == before
    assert (tmp_path / "target").read_text() == "as of a shell's >"
