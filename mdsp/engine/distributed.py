"""Joining the job: device, torch.distributed through DeepSpeed, communicators warmed."""

from __future__ import annotations

import datetime
import os

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from mdsp.errors import TrainingError
from mdsp.rank_output import Place


def join_job(place: Place, timeout_s: float) -> torch.device:
    """Initialise torch.distributed on this rank's device: NCCL on GPUs, gloo on CPUs. Collective.

    Args:
        place: this process in the job.
        timeout_s: seconds after which a collective that a peer does not join raises.

    Raises:
        TrainingError: the port at which the ranks meet is taken.
    """
    # On CPU, DeepSpeed would compile a shared-memory all-reduce that only its inference uses: half a minute, a
    # compiler, and segments left in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        # Ranks share the cores; more threads than cores only wait for each other.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.ranks_per_node))
    else:
        accelerator.set_device(place.local_rank)
    try:
        deepspeed.init_distributed(
            dist_backend="gloo" if on_cpu else accelerator.communication_backend_name(),
            auto_mpi_discovery=False,
            verbose=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise TrainingError(
            f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']}, where the ranks meet, is in use, "
            f"perhaps by another job on this machine; give the launcher a free one: deepspeed --master_port N"
        ) from None
    device = torch.device(accelerator.current_device_name())
    # Every rank is there, and the communicator of the whole job exists, before anything expensive starts.
    dist.all_reduce(torch.zeros(1, device=device))
    return device


def leave_job() -> None:
    """Wait for every rank, then close the communicators. Collective."""
    dist.barrier()
    dist.destroy_process_group()
