"""Fault campaign: many jobs, each disturbed at random until it ends, each with the weights of an undisturbed one.

    python -m tests.faults.campaign --trials 50 [--seed N]

Every trial starts a job of four real ranks, does one to three random things to it or to its files, starts it again
after each, lets it finish, and compares the last checkpoint with the undisturbed run's, tensor by tensor. It also looks
for processes, shared memory and half-written directories that were left behind. Exit code 1 when anything is not as it
must be.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from mdsp.checkpoint.rotation import checkpoints_in
from tests.faults.job import Job, final_hashes, left_behind, write_config

STEPS, INTERVAL = 20, 3


@dataclass(frozen=True)
class Trial:
    """One job, over all its starts."""

    config: Path
    choose: random.Random

    @property
    def checkpoints(self) -> Path:
        return self.config.parent / "checkpoints"


def _until_a_random_moment(trial: Trial, job: Job) -> None:
    """Anything from before the first step to after the last."""
    time.sleep(trial.choose.uniform(0.0, 5.0))


def _signalled(trial: Trial, number: signal.Signals, everyone: bool, moment: Callable[[Trial, Job], None]) -> str:
    with Job(trial.config) as job:
        moment(trial, job)
        processes = job.processes()[1:]
        victims = processes if everyone else trial.choose.sample(processes, min(1, len(processes)))
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        code = job.wait()
    return f"{number.name} to {'all' if everyone else 'one'} (exit {code})"


def kill_one(trial: Trial) -> str:
    return _signalled(trial, signal.SIGKILL, False, _until_a_random_moment)


def kill_all(trial: Trial) -> str:
    return _signalled(trial, signal.SIGKILL, True, _until_a_random_moment)


def _while_saving(trial: Trial, job: Job) -> None:
    for _ in range(trial.choose.randrange(3)):
        _await(lambda: bool(list(trial.checkpoints.glob(".saving-*"))))
        _await(lambda: not list(trial.checkpoints.glob(".saving-*")))
    _await(lambda: bool(list(trial.checkpoints.glob(".saving-*"))))
    time.sleep(trial.choose.uniform(0, 0.02))


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)


def kill_all_while_saving(trial: Trial) -> str:
    return _signalled(trial, signal.SIGKILL, True, _while_saving) + " while saving"


def stop_request(trial: Trial) -> str:
    return _signalled(trial, trial.choose.choice([signal.SIGTERM, signal.SIGUSR1]), True, _until_a_random_moment)


def freeze_one(trial: Trial) -> str:
    with Job(trial.config) as job:
        with contextlib.suppress(AssertionError):
            job.wait_for_step(trial.choose.randrange(1, STEPS), seconds=15)
        victim = trial.choose.randrange(4)
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
            job.rank_process(victim).send_signal(signal.SIGSTOP)
        code = job.wait()
    return f"SIGSTOP to rank {victim} (exit {code})"


def slow_one(trial: Trial) -> str:
    with Job(trial.config) as job:
        victim = job.rank_process(trial.choose.randrange(4))
        for _ in range(3):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGSTOP)
                time.sleep(0.4)
                victim.send_signal(signal.SIGCONT)
                time.sleep(0.4)
        code = job.wait()
    return f"a slow rank (exit {code})"


def full_disk(trial: Trial) -> str:
    victim, limit = trial.choose.randrange(4), trial.choose.choice([12_000, 20_000, 40_000])

    def sabotage(rank: int) -> None:
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with Job(trial.config, sabotage=sabotage) as job:
        code = job.wait()
    return f"no file above {limit} bytes on rank {victim} (exit {code})"


def failing_disk(trial: Trial) -> str:
    victim, number = trial.choose.randrange(4), trial.choose.choice([errno.EIO, errno.ENOSPC])
    first = trial.choose.randrange(60)

    def sabotage(rank: int) -> None:
        flush, calls = os.fsync, iter(range(1_000_000))

        def fsync(descriptor: int) -> None:
            if first <= next(calls) < first + 3:
                raise OSError(number, os.strerror(number))
            flush(descriptor)

        if rank == victim:
            os.fsync = fsync

    with Job(trial.config, sabotage=sabotage) as job:
        code = job.wait()
    return f"{errno.errorcode[number]} on rank {victim} from flush {first} on (exit {code})"


def _some_checkpoint(trial: Trial) -> Path | None:
    """Makes sure that at least two exist, and returns the newest."""
    if len(checkpoints_in(trial.checkpoints)) < 2:
        with Job(trial.config) as job:
            with contextlib.suppress(AssertionError):
                job.wait_for_step(3 * INTERVAL - 1, seconds=20)
            for process in job.processes()[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            job.wait()
    found = checkpoints_in(trial.checkpoints)
    return found[0] if len(found) > 1 else None


def damage(trial: Trial) -> str:
    checkpoint = _some_checkpoint(trial)
    if checkpoint is None:
        return "nothing to damage"
    file = trial.choose.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    how = trial.choose.choice(["bit flipped", "truncated", "removed", "grown"])
    if how == "removed":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, trial.choose.randrange(file.stat().st_size))
    elif how == "grown":
        file.write_bytes(file.read_bytes() + b"\0")
    else:
        data = bytearray(file.read_bytes())
        data[trial.choose.randrange(len(data))] ^= 1 << trial.choose.randrange(8)
        file.write_bytes(data)
    return f"{checkpoint.name}/{file.name} {how}"


def latest_nowhere(trial: Trial) -> str:
    _some_checkpoint(trial)
    if trial.checkpoints.is_dir():
        (trial.checkpoints / "latest").write_text(trial.choose.choice(["global_step777", "", "../elsewhere"]))
    return "latest points nowhere"


FAULTS: list[Callable[[Trial], str]] = [
    kill_one,
    kill_all,
    kill_all_while_saving,
    stop_request,
    freeze_one,
    slow_one,
    full_disk,
    failing_disk,
    damage,
    latest_nowhere,
]


def _job_processes() -> set[int]:
    """Processes below this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def run_trial(folder: Path, seed: int, expected: dict[tuple[str, int], str]) -> tuple[list[str], list[str]]:
    """(what was done, what is not as it must be)."""
    choose = random.Random(seed)
    config = write_config(
        folder,
        STEPS,
        INTERVAL,
        train={"watchdog": {"factor": 3.0, "minimum": 3.0, "first_step": 15.0}},
        checkpoint={"keep_last": 3, "background": bool(seed % 2)},
    )
    trial, done, wrong = Trial(config, choose), [], []
    shared_memory = set(os.listdir("/dev/shm"))
    for fault in choose.choices(FAULTS, k=choose.randint(1, 3)):
        try:
            done.append(fault(trial))
        except AssertionError as error:
            done.append(fault.__name__)
            wrong.append(str(error))
    with Job(config) as job:
        code = job.wait()
        if code:
            wrong.append(f"the last start exited with {code}: {job.output()[-600:]}")
    if not wrong and final_hashes(folder, STEPS) != expected:
        wrong.append("the weights or moments differ from the undisturbed run's")
    if not wrong and left_behind(folder):
        wrong.append(f"left behind: {left_behind(folder)}")
    if set(os.listdir("/dev/shm")) - shared_memory:
        wrong.append(f"shared memory left behind: {set(os.listdir('/dev/shm')) - shared_memory}")
    if _job_processes():
        wrong.append(f"processes left behind: {_job_processes()}")
    return done, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Fault campaign on real training jobs.")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    failed, kinds = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="mdsp-campaign-") as name:
        root = Path(name)
        (root / "undisturbed").mkdir()
        with Job(write_config(root / "undisturbed", STEPS, INTERVAL)) as job:
            if job.wait():
                print(job.output())
                return 1
        expected = final_hashes(root / "undisturbed", STEPS)
        for index in range(arguments.trials):
            folder = root / f"trial{index}"
            folder.mkdir()
            done, wrong = run_trial(folder, arguments.seed + index, expected)
            kinds.update(done_.split(" (")[0].split(" to rank")[0] for done_ in done)
            verdict = "; ".join(wrong) or "as undisturbed"
            print(f"trial {index} (seed {arguments.seed + index}): {'; '.join(done)}: {verdict}", flush=True)
            failed += bool(wrong)
            shutil.rmtree(folder)
    print(f"{arguments.trials} trials, {sum(kinds.values())} faults, {failed} not as they must be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
