"""A rank's death is told once, by its supervisor, and the other ranks of the host do not outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from mdsp.supervisor import Say, Supervisor

Work = Callable[[Say], int]


def launch(folder: Path, works: list[Work]) -> tuple[list[int], str]:
    """Supervisors of some ranks below one launcher; their exit codes, and what they printed."""
    console = folder / "console"
    launcher = os.fork()
    if launcher == 0:
        codes = [1]
        try:
            pids = []
            for rank, work in enumerate(works):
                pid = os.fork()
                if pid == 0:
                    code = 99
                    with contextlib.suppress(BaseException), console.open("a") as errors:
                        code = Supervisor(rank, folder / "logs", folder / f"log{rank}", errors).run(work)
                    os._exit(code)
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        finally:
            (folder / "codes").write_text(" ".join(map(str, codes)))
            os._exit(0)
    os.waitpid(launcher, 0)
    codes = [int(code) for code in (folder / "codes").read_text().split()]
    return codes, console.read_text() if console.exists() else ""


def well(say: Say) -> int:
    return 0


def killed(say: Say) -> int:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hung(say: Say) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return 0


def peer_lost(say: Say) -> int:
    time.sleep(0.3)
    say("rank 1: RuntimeError: Connection closed by peer", False)
    return 1


def refused(say: Say) -> int:
    say("the checkpoint is damaged", True)
    return 2


def silent_failure(say: Say) -> int:
    return 7


def last_words_and_hang(say: Say) -> int:
    say("rank 0: ValueError: no", False)
    time.sleep(600)
    return 0


def test_nothing_is_said_of_a_good_end(tmp_path: Path) -> None:
    assert launch(tmp_path, [well, well]) == ([0, 0], "")


def test_a_signal_is_named_and_hung_peers_are_ended(tmp_path: Path) -> None:
    codes, output = launch(tmp_path, [killed, peer_lost, hung])
    assert codes == [137, 1, 137]
    (line,) = output.splitlines()
    assert line.startswith("mdsp: error: rank 0 was killed by SIGKILL")
    assert line.endswith(f"its log is {tmp_path / 'log0'}")


def test_an_error_that_all_meet_is_told_once(tmp_path: Path) -> None:
    assert launch(tmp_path, [refused] * 4) == ([2] * 4, "mdsp: error: the checkpoint is damaged\n")


def test_an_exit_status_is_named(tmp_path: Path) -> None:
    codes, output = launch(tmp_path, [silent_failure, hung])
    assert codes == [7, 137]
    assert output == f"mdsp: error: rank 0 exited with status 7; its log is {tmp_path / 'log0'}\n"


def test_a_rank_that_fails_and_does_not_end_is_ended(tmp_path: Path) -> None:
    codes, output = launch(tmp_path, [last_words_and_hang])
    assert codes == [137]
    assert output == "mdsp: error: rank 0: ValueError: no\n"


def test_a_rank_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    def work(say: Say) -> int:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)
        return 0

    supervisor = os.fork()
    if supervisor == 0:
        with contextlib.suppress(BaseException):
            Supervisor(0, tmp_path / "logs", tmp_path / "log", sys.stderr).run(work)
        os._exit(1)
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    psutil.wait_procs([rank], timeout=5)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def test_signals_reach_the_rank(tmp_path: Path) -> None:
    def work(say: Say) -> int:
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
        os.kill(os.getppid(), signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while not got and time.monotonic() < deadline:
            time.sleep(0.01)
        return 0 if got else 3

    assert launch(tmp_path, [work]) == ([0], "")
