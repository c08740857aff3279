"""Compares the optimizer state of two checkpoints of training, whatever their layouts and forms."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path

import torch

from mdsp.checkpoint.check import Comparison
from mdsp.checkpoint.jobs import default_threads, run_jobs
from mdsp.checkpoint.stream import hash_pieces
from mdsp.checkpoint.weights import ShardedWeights, open_weights
from mdsp.errors import CheckpointError
from mdsp.model.table import parameter_table


def compare_optimizer_states(a: Path, b: Path, threads: int | None = None) -> Comparison | str:
    """Compare master weights, moments and steps, tensor by tensor; a sentence when there is nothing to compare.

    Every file that is read is compared with its hash first.

    Raises:
        CheckpointError: a file is damaged.
    """
    first, second = open_weights(a), open_weights(b)
    have = [isinstance(one, ShardedWeights) and one.manifest.training is not None for one in (first, second)]
    if not any(have):
        return "neither has any"
    if not all(have):
        return f"only in {a if have[0] else b}"
    if first.config != second.config:
        return "of different models, not compared"
    assert isinstance(first, ShardedWeights) and isinstance(second, ShardedWeights)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed announces the accelerator that it has not found
        from mdsp.checkpoint.optimizer_state import open_optimizer_state
    try:
        ours, theirs = (open_optimizer_state(one.directory, one.manifest, verify=True) for one in (first, second))
    except CheckpointError as error:
        return f"not compared: {error}"
    parameters = tuple(parameter_table(first.config))
    found: dict[int, tuple[int, list[str]]] = {}
    lock = threading.Lock()

    def job(index: int) -> None:
        parameter = parameters[index]
        mine, other = ours.states(parameter), theirs.states(parameter)
        different = [
            key
            for key in {**mine, **other}
            if key not in mine
            or key not in other
            or mine[key][0].dtype != other[key][0].dtype
            or hash_pieces(mine[key], mine[key][0].dtype) != hash_pieces(other[key], other[key][0].dtype)
        ]
        steps = [torch.as_tensor(-1 if one is None else one) for one in (ours.step(parameter), theirs.step(parameter))]
        if not torch.equal(*steps):
            different.append("step")
        with lock:
            found[index] = (len(mine), [f"optimizer state: {key} of {parameter.name}" for key in different])

    run_jobs(range(len(parameters)), job, threads or default_threads())
    return Comparison(
        sum(count for count, _ in found.values()), tuple(line for index in sorted(found) for line in found[index][1])
    )
