"""Peak memory of this rank, and of every stage on the first one."""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: what the allocator handed out on a GPU, the resident size of the process on a CPU.

    The allocator's cache and the GPU's context are not in it; `nvidia-smi` shows more.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def gather_peak_memory(device: torch.device, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Peak memory of every rank of the group, in its order. Collective."""
    mine = torch.tensor([peak_memory_bytes(device)], dtype=torch.int64, device=device)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return tuple(int(value) for value in everyone)
