"""A training job of real processes: a launcher, its supervisors, their ranks; and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import mdsp.train
import tests.harness  # noqa: F401  imports torch and DeepSpeed before ranks are forked
from mdsp.data.indexed import IndexedWriter, token_dtype
from mdsp.metrics.run import read_lines

VOCAB = 257


def write_corpus(prefix: Path) -> None:
    """Some documents of random tokens."""
    generator = np.random.default_rng(7)
    with IndexedWriter(prefix, token_dtype(VOCAB)) as writer:
        for length in generator.integers(20, 200, size=60):
            writer.append(generator.integers(0, VOCAB, size=length))
            writer.end_document()
        writer.commit()


def write_config(folder: Path, steps: int = 24, interval: int = 4, **sections: dict[str, Any]) -> Path:
    """A configuration of a tiny GPT with dropout on 4 ranks (pipeline 2 x data 2) that saves below `folder`."""
    corpus = folder / "corpus"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus)
    document: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "mdsp": {
            "model": {
                "family": "gpt2",
                "n_layers": 2,
                "hidden_size": 32,
                "n_heads": 4,
                "vocab_size": VOCAB,
                "max_positions": 32,
                "hidden_dropout": 0.1,
            },
            "parallel": {"pipeline": 2},
            "data": {"train": str(corpus), "seq_length": 16},
            "train": {"steps": steps, "schedule": {"warmup": 4}},
            "checkpoint": {"dir": str(folder / "checkpoints"), "interval": interval, "resume": "auto"},
            "monitor": {"dir": str(folder / "run"), "timeline_interval": 0},
        },
    }
    for name, values in sections.items():
        document["mdsp"][name].update(values)
    path = folder / "config.json"
    path.write_text(json.dumps(document))
    return path


@dataclass
class Job:
    """A job; `with Job(...) as job` leaves no process behind."""

    config: Path
    world_size: int = 4
    overrides: Sequence[str] = ()
    sabotage: Callable[[int], None] | None = None
    """Called in the process of each rank's supervisor, with the rank, before it starts."""
    pid: int = 0
    ranks: list[int] = field(default_factory=list)

    def __enter__(self) -> Job:
        # Rows of earlier starts say nothing about this one.
        self.earlier_rows = len(list(read_lines(self.metrics)))
        self.console = self.config.with_name(f"console-{time.monotonic_ns()}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = self._launch()
            finally:
                os._exit(code)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.code is None:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            os.waitpid(self.pid, 0)

    code: int | None = None

    def _launch(self) -> int:
        """What DeepSpeed's launcher does: start the ranks, end all when one fails; in this process's own session."""
        os.setsid()
        descriptor = os.open(self.console, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # pytest has put objects of its own in their places
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        running = {self._fork(rank): rank for rank in range(self.world_size)}

        def pass_on(number: int, frame: object) -> None:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

        signal.signal(signal.SIGTERM, pass_on)
        failed, deadline = 0, 0.0
        while running:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if running.pop(pid, None) is not None and not failed:
                failed = os.waitstatus_to_exitcode(status)
                if failed:
                    pass_on(signal.SIGTERM, None)
                    deadline = time.monotonic() + 10
            if failed and time.monotonic() > deadline:
                pass_on(signal.SIGKILL, None)
            time.sleep(0.02)
        return failed if 0 <= failed < 256 else 1

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_SIZE": self.world_size}
            os.environ.update({name: str(value) for name, value in places.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
            torch.set_num_threads(1)
            if self.sabotage is not None:
                self.sabotage(rank)
            arguments = ["--deepspeed_config", str(self.config)]
            code = mdsp.train.main([*arguments, *(word for pair in self.overrides for word in ("--set", pair))])
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds: float = 90) -> int:
        """The job's exit code. AssertionError when it does not end in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
            time.sleep(0.02)
        raise AssertionError(f"the job did not end within {seconds} s\n{self.output()}\n{self.logs()}")

    def processes(self) -> list[psutil.Process]:
        """Every process of the job that lives, the launcher first."""
        try:
            launcher = psutil.Process(self.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rank_process(self, rank: int) -> psutil.Process:
        """The process that trains rank `rank`: the child of its supervisor."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                supervisors = sorted(psutil.Process(self.pid).children(), key=lambda process: process.pid)
                return supervisors[rank].children()[0]
            time.sleep(0.01)
        raise AssertionError("the rank never started")

    @property
    def metrics(self) -> Path:
        """The records of the run, over all its starts."""
        return Path(json.loads(self.config.read_text())["mdsp"]["monitor"]["dir"]) / "metrics.jsonl"

    def wait_for_step(self, step: int, seconds: float = 60) -> None:
        """Until this start of the job has recorded that step or a later one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            rows = list(read_lines(self.metrics))[self.earlier_rows :]
            if any(row.get("step", 0) >= step for row in rows):
                return
            if not psutil.pid_exists(self.pid):
                break
            time.sleep(0.01)
        raise AssertionError(f"step {step} was never recorded\n{self.output()}\n{self.logs()}")

    def output(self) -> str:
        """What the terminal showed."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def logs(self) -> str:
        """The ends of the ranks' logs."""
        folder = Path(json.loads(self.config.read_text())["mdsp"]["monitor"]["dir"]) / "logs"
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(folder.glob("*.log"))
        )


def final_hashes(folder: Path, step: int) -> dict[tuple[str, int], str]:
    """Hashes of every weight, and of the optimizer's tensors, in the checkpoint after `step` steps."""
    from mdsp.checkpoint.engine_io import read_file, tensor_hash

    checkpoint = folder / "checkpoints" / f"global_step{step}"
    found = {}
    for path in sorted(checkpoint.glob("*_optim_states.pt")):
        state = read_file(path)["optimizer_state_dict"]
        for index, flat in enumerate(state["single_partition_of_fp32_groups"]):
            found[f"{path.name} master", index] = tensor_hash(flat)
        for index, own in state["base_optimizer_state"]["state"].items():
            for key, value in own.items():
                found[f"{path.name} {key}", index] = tensor_hash(torch.as_tensor(value).reshape(-1))
    for path in sorted(checkpoint.glob("layer_*.pt")):
        for index, value in enumerate(read_file(path).values()):
            found[path.name, index] = tensor_hash(value)
    assert found
    return found


def left_behind(folder: Path) -> list[str]:
    """Names in the checkpoint directory that do not belong there between two runs, and meeting places of ranks."""
    names = [path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("global_step")]
    return [name for name in names if name not in ("latest", ".lock")] + [
        path.name for path in (folder / "run").glob("watchdog")
    ]
