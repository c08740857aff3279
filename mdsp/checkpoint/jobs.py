"""Runs one job per pipeline layer on some threads, and stops all of them at the first error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch

MAX_THREADS = 8
"""More threads than this only make a disk seek."""


def default_threads() -> int:
    """Threads of a conversion: reading, hashing and writing release Python's lock."""
    return max(2, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def run_jobs(layers: Sequence[int], job: Callable[[int], None], threads: int) -> None:
    """job(layer) for every layer, in order, on `threads` threads.

    Raises:
        The first error of any job, once the jobs that were running have ended; no further job is begun.
    """
    stop = threading.Event()

    def guarded(layer: int) -> None:
        if stop.is_set():
            return
        try:
            job(layer)
        except BaseException:
            stop.set()
            raise

    # The jobs are the parallelism: torch's own threads inside each would only wait for each other.
    inner = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            futures = [pool.submit(guarded, layer) for layer in layers]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:  # an interrupt: let the running jobs end, begin no other
                stop.set()
                raise
            for future in done:
                future.result()
    finally:
        torch.set_num_threads(inner)
