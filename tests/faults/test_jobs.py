"""Jobs that are killed, stopped, starved and damaged end with the weights of an undisturbed one, and leave nothing."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from deepspeed.runtime.pipe.schedule import ForwardPass

from mdsp.directory_lock import DirectoryLock
from mdsp.engine.engine import MdspEngine
from tests.faults.job import Job, final_hashes, left_behind, write_config

STEPS, INTERVAL = 16, 4
Hashes = dict[tuple[str, int], str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Hashes:
    """The last checkpoint of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Job(write_config(folder, STEPS, INTERVAL)) as job:
        assert job.wait() == 0, job.output() + job.logs()
    return final_hashes(folder, STEPS)


def assert_finishes(config: Path, expected: Hashes, says: str | None = None) -> None:
    """The next start of the job continues and ends as if nothing had happened."""
    folder = config.parent
    with Job(config) as job:
        assert job.wait() == 0, job.output() + job.logs()
    if says is not None:
        assert says in " ".join(job.output().split())
    assert final_hashes(folder, STEPS) == expected
    assert (folder / "checkpoints" / "latest").read_text() == f"global_step{STEPS}"
    assert left_behind(folder) == []


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("mdsp: error:")]


def test_a_killed_rank_takes_the_job_down_with_one_message(tmp_path: Path, undisturbed: Hashes) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    config = write_config(tmp_path, STEPS, INTERVAL)
    rank = random.Random().randrange(4)
    with Job(config) as job:
        job.wait_for_step(6)
        family = job.processes()
        job.rank_process(rank).send_signal(signal.SIGKILL)
        assert job.wait(20) == 128 + signal.SIGKILL
    assert not any(process.is_running() for process in family)
    (message,) = errors_in(job.output())
    assert f"rank {rank} was killed by SIGKILL" in message
    assert f"logs/rank_{rank:04d}.log" in message
    assert all((tmp_path / "run" / "logs" / f"rank_{each:04d}.log").exists() for each in range(4))
    assert_finishes(config, undisturbed, says="continuing from")
    assert set(os.listdir("/dev/shm")) == shared_memory


def test_all_killed_while_saving(tmp_path: Path, undisturbed: Hashes) -> None:
    config = write_config(tmp_path, STEPS, INTERVAL)
    checkpoints = tmp_path / "checkpoints"
    with Job(config) as job:
        job.wait_for_step(5)
        deadline = time.monotonic() + 30
        while not list(checkpoints.glob(".saving-*/global_step*/*")) and time.monotonic() < deadline:
            time.sleep(0.0005)
        for process in job.processes()[1:]:
            process.kill()
        job.wait(20)
    assert_finishes(config, undisturbed)


def _no_large_files(rank: int) -> None:
    """Nothing above 20 kB can be written by rank 1, whose signal for it Python ignores."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.parametrize(("name", "key"), [("checkpoints", "mdsp.checkpoint.dir"), ("run", "mdsp.monitor.dir")])
def test_two_jobs_do_not_share_a_directory(name: str, key: str, tmp_path: Path) -> None:
    """The second is told, once, and removes nothing of the first; a killed job holds nothing."""
    config = write_config(tmp_path, STEPS, INTERVAL)
    saving = tmp_path / "checkpoints" / ".saving-global_step4"
    saving.mkdir(parents=True)
    ready, written = os.pipe()
    holder = os.fork()
    if holder == 0:
        DirectoryLock(tmp_path / name, "the key")
        os.write(written, b".")
        signal.pause()
    os.read(ready, 1)
    with Job(config) as job:
        assert job.wait() == 2, job.output() + job.logs()
    (message,) = errors_in(job.output())
    assert f"in use by another job (process {holder} on " in message
    assert message.endswith(f"choose another {key}")
    assert saving.is_dir()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with Job(config, overrides=["mdsp.train.steps=4"]) as job:
        assert job.wait() == 0, job.output() + job.logs()
    assert not saving.exists()


def take_the_port(rank: int) -> None:
    """Listen, for as long as rank 0's supervisor lives, where the ranks are to meet."""
    if rank == 0:
        taken = socket.socket()
        taken.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        taken.listen()
        os.set_inheritable(taken.detach(), True)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with Job(
        write_config(tmp_path), world_size=2, overrides=["mdsp.parallel.pipeline=1"], sabotage=take_the_port
    ) as job:
        assert job.wait() != 0
    (message,) = errors_in(job.output())
    assert f"port {job.port} of 127.0.0.1, where the ranks meet, is in use" in message
    assert "--master_port" in message


def test_a_finished_run_says_that_it_is(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=2, train={"schedule": {"warmup": 0}})
    for says in ("step 2/2", "nothing is left to do: mdsp.train.steps is 2, and 2 are done"):
        with Job(config, world_size=2, overrides=["mdsp.parallel.pipeline=1"]) as job:
            assert job.wait() == 0, job.output() + job.logs()
        assert says in " ".join(job.output().split())


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_directory_that_cannot_be_written_is_named(kind: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    directory = blocked if kind == "file" else blocked / "run"
    overrides = ["mdsp.parallel.pipeline=1", f"mdsp.monitor.dir={directory}"]
    with Job(write_config(tmp_path), world_size=2, overrides=overrides) as job:
        assert job.wait() != 0
    (message,) = errors_in(job.output())
    assert message.startswith(f"mdsp: error: mdsp.monitor.dir = {directory}: ")
    assert "Traceback" not in job.output()


def test_a_full_disk_costs_checkpoints_and_nothing_else(tmp_path: Path, undisturbed: Hashes) -> None:
    config = write_config(tmp_path, STEPS, INTERVAL)
    with Job(config, overrides=[f"mdsp.train.steps={INTERVAL}", f"mdsp.train.schedule.total={STEPS}"]) as job:
        assert job.wait() == 0, job.output()
    with Job(config, sabotage=_no_large_files) as job:
        assert job.wait() == 2
    assert f"rank 1: {os.strerror(errno.EFBIG)}" in " ".join(job.output().split())
    assert "warning: checkpoint" in " ".join(job.output().split())  # those in the middle do not end the run
    assert len(errors_in(job.output())) == 1
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"global_step4", "latest", ".lock"}
    assert_finishes(config, undisturbed, says="global_step4, after step 4")


def _failing_disk(rank: int) -> None:
    """From the 5th flush of rank 0's files on, the disk fails once in each of two saves."""
    if rank:
        return
    flush: Callable[[int], None] = os.fsync
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls in (5, 6):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    os.fsync = fsync


def test_a_failing_disk_in_the_middle_of_a_run(tmp_path: Path, undisturbed: Hashes) -> None:
    config = write_config(tmp_path, STEPS, INTERVAL)
    with Job(config, sabotage=_failing_disk) as job:
        assert job.wait() == 0, job.output()
    assert f"rank 0: {os.strerror(errno.EIO)}" in " ".join(job.output().split())
    kept = {path.name for path in (tmp_path / "checkpoints").glob("global_step*")}
    assert kept == {"global_step12", "global_step16"}
    assert final_hashes(tmp_path, STEPS) == undisturbed
    assert left_behind(tmp_path) == []


def test_a_request_to_stop_saves_and_ends_well(tmp_path: Path, undisturbed: Hashes) -> None:
    """Also when it reaches one rank only, as DeepSpeed's launcher sends it."""
    config = write_config(tmp_path, STEPS, interval=100)
    with Job(config) as job:
        job.wait_for_step(3)
        job.rank_process(2).parent().send_signal(signal.SIGUSR1)  # the supervisor passes it on
        assert job.wait() == 0, job.output()
    said = " ".join(job.output().split())
    assert "SIGUSR1 received: training stops after step" in said
    (checkpoint,) = (tmp_path / "checkpoints").glob("global_step*")
    assert checkpoint.name.removeprefix("global_step") in said
    assert_finishes(config, undisturbed, says="continuing from")


def test_a_stopped_rank_is_found_and_the_job_ended(tmp_path: Path, undisturbed: Hashes) -> None:
    # The signal may meet the rank in a step or between two.
    budgets = {"factor": 2.0, "minimum": 2.0, "first_step": 15.0}
    config = write_config(tmp_path, STEPS, INTERVAL, train={"watchdog": budgets})
    with Job(config) as job:
        job.wait_for_step(6)
        family = job.processes()
        stopped = job.rank_process(3)
        stopped.send_signal(signal.SIGSTOP)
        assert job.wait(60) != 0
    assert not any(process.is_running() for process in family)
    output = job.output()
    assert len(errors_in(output)) == 1
    assert "exceeded its budget of" in output
    assert f"process {stopped.pid} is stopped (SIGSTOP)" in output
    assert "Likely culprit: rank 3" in output
    assert output.count("waits for") == 1
    assert_finishes(config, undisturbed)


def _hangs(rank: int) -> None:
    """Rank 1 never comes back from a forward pass of step 6."""
    if rank != 1:
        return
    forward = MdspEngine._INSTRUCTION_MAP[ForwardPass]

    def hang(engine: MdspEngine, buffer_id: int) -> None:
        if engine.global_steps == 5:
            time.sleep(600)
        forward(engine, buffer_id=buffer_id)

    MdspEngine._INSTRUCTION_MAP = {**MdspEngine._INSTRUCTION_MAP, ForwardPass: hang}


def test_a_hung_rank_is_found_with_its_stack(tmp_path: Path) -> None:
    config = write_config(tmp_path, STEPS, INTERVAL, train={"watchdog": {"factor": 2.0, "minimum": 2.0}})
    with Job(config, sabotage=_hangs) as job:
        assert job.wait(60) == 1
    output = job.output()
    assert len(errors_in(output)) == 1 and "step 6 exceeded its budget" in output
    culprits = [line for line in output.splitlines() if "Likely culprit" in line]
    assert len(culprits) == 1 and "rank 1 (process" in culprits[0] and "s in forward" in culprits[0]
    assert "time.sleep(600)" in output
    rows = {int(line.split()[0]): line for line in output.splitlines() if line[:6].strip().isdigit()}
    assert rows[1].endswith("nobody") and rows[3].endswith("rank 1")  # stage 1's peer waits for its activation
    assert all(f"rank_{rank:04d}.json" in os.listdir(tmp_path / "run" / "watchdog") for rank in range(4))


def test_a_slow_rank_changes_nothing(tmp_path: Path, undisturbed: Hashes) -> None:
    config = write_config(tmp_path, STEPS, INTERVAL)
    with Job(config) as job:
        for step in (3, 6):
            job.wait_for_step(step)
            slow = job.rank_process(1)
            slow.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            slow.send_signal(signal.SIGCONT)
        assert job.wait() == 0, job.output()
    assert final_hashes(tmp_path, STEPS) == undisturbed


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, undisturbed: Hashes) -> None:
    config = write_config(tmp_path, STEPS, INTERVAL)
    with Job(config, overrides=["mdsp.train.steps=8", f"mdsp.train.schedule.total={STEPS}"]) as job:
        assert job.wait() == 0, job.output()
    shard = tmp_path / "checkpoints" / "global_step8" / "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    assert_finishes(config, undisturbed, says="its bytes are not those that were written")
