"""Runs a function on several NCCL ranks, each a process of its own; they share what GPUs there are.

NCCL refuses two ranks of one host on one GPU. With host names of their own (NCCL_HOSTID) they are ranks of different
hosts to it, which talk over sockets: slow, and otherwise the real thing.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def run_gpu_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, seconds: float = 240) -> list[Any]:
    """function(*arguments) on every rank; what each returned, tensors moved to the CPU, in rank order.

    Raises RuntimeError with the failed ranks' output when one fails, subprocess.TimeoutExpired when one does not end.
    """
    with tempfile.TemporaryDirectory(prefix="mdsp-gpu-") as name:
        folder = Path(name)
        torch.save((function, arguments), folder / "work")
        processes = []
        for rank in range(world_size):
            environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"} | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),  # see _main
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",  # never opened: ranks meet in a file
                "NCCL_HOSTID": f"rank-{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
            }
            command = [sys.executable, "-m", "tests.gpu.ranks", str(folder), str(rank), str(world_size), str(seconds)]
            log = (folder / f"log.{rank}").open("wb")
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
            log.close()
        try:
            codes = [process.wait(seconds) for process in processes]
        finally:
            for process in processes:
                process.kill()  # those that have ended do not mind
                process.wait()
            if any(process.returncode for process in processes):
                sys.stdout.write("".join(_tail(folder / f"log.{i}") for i in range(world_size)))
        if any(codes):
            raise RuntimeError(f"exit codes {codes}; the ranks' output is above")
        return [
            torch.load(folder / f"result.{rank}", map_location="cpu", weights_only=False) for rank in range(world_size)
        ]


def _tail(path: Path) -> str:
    return f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}\n"


def _main(folder: Path, rank: int, world_size: int, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds - 5)
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see mdsp.engine.distributed
    gpu = get_accelerator().device_name() == "cuda"  # decided here, before a test's module asks for the CPU
    if gpu:
        os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())  # DeepSpeed's choice of the device
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", torch.cuda.current_device()) if gpu else None,
    )
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    function, arguments = torch.load(folder / "work", weights_only=False)
    torch.save(function(*arguments), folder / f"result.{rank}")
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
