"""A device's attainable matrix rate, measured: the peak for CPUs and for devices that are not in the table."""

from __future__ import annotations

import time

import torch


def measure_gemm_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, seconds: float = 0.5) -> float:
    """Best rate in FLOP/s over repeated products of two `[size, size]` matrices within about `seconds`.

    On a CPU it uses the threads that torch uses now, so measure in the process that trains, not beside it. It is the
    best of all repeats, because any disturbance only lowers a rate.
    """
    if size is None:
        size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, size, generator=generator).to(device, dtype)
    b = torch.randn(size, size, generator=generator).to(device, dtype)
    best, deadline = float("inf"), time.perf_counter() + seconds
    repeats = 0
    with torch.no_grad():
        while repeats < 3 or time.perf_counter() < deadline:
            _synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b)
            _synchronize(device)
            if repeats:  # the first product pays for warm-up
                best = min(best, time.perf_counter() - start)
            repeats += 1
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
