"""Runs a function on several gloo ranks by forking from this process, which has imported torch and DeepSpeed once."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a thread pool at the fork would deadlock the children
os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed
import deepspeed.ops.adam
import deepspeed.runtime.zero.stage_1_and_2
import torch
import torch._dynamo
import torch._inductor.compile_fx

torch.set_num_threads(1)
# On CPU, DeepSpeed would compile a shared-memory all-reduce that only its inference uses (see mdsp.engine.distributed).
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, folder: Path, arguments: tuple[Any, ...], seconds: int
) -> None:
    faulthandler.enable()
    gc.freeze()  # what the parent imported never dies: collections need not look at it, nor copy its pages
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # never opened: ranks meet in a file
    )
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.save(function(*arguments), folder / f"result.{rank}")


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, seconds: int = 120) -> list[Any]:
    """function(*arguments) on every rank; what each returned, in rank order.

    Raises RuntimeError with the failed ranks' output when one fails or does not end in time. No process survives.
    """
    with tempfile.TemporaryDirectory(prefix="mdsp-ranks-") as name:
        folder = Path(name)
        running = {_fork(function, rank, world_size, folder, arguments, seconds): rank for rank in range(world_size)}
        codes: dict[int, int] = {}
        deadline = time.monotonic() + seconds
        try:
            while running and time.monotonic() < deadline:
                for pid in list(running):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
                if any(codes.values()):
                    deadline = min(deadline, time.monotonic() + 2)  # the others may still say why
                time.sleep(0.01)
        finally:
            hung = sorted(running.values())
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if hung or any(codes.values()):
            report = [f"exit codes {codes}, killed {hung}"]
            for rank in range(world_size):
                if codes.get(rank, 1) != 0:
                    report.append(f"--- rank {rank}\n" + (folder / f"log.{rank}").read_text(errors="replace")[-4000:])
            raise RuntimeError("\n".join(report))
        return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(world_size)]


def _fork(
    function: Callable[..., Any], rank: int, world_size: int, folder: Path, arguments: tuple[Any, ...], seconds: int
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"log.{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _rank_main(function, rank, world_size, folder, arguments, seconds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
