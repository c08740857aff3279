"""Batch arithmetic: global batch = micro-batch x accumulation steps x data-parallel degree."""

from __future__ import annotations

from dataclasses import dataclass

from mdsp.config.problems import MISSING, Problem, divisors, nearest

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples per optimizer step and how they are cut."""

    global_batch: int
    """Samples per optimizer step over all data-parallel ranks."""
    micro_batch: int
    """Samples that go through the pipeline together."""
    accumulation: int
    """Micro-batches per optimizer step and data-parallel rank."""


def resolve_batch(train: int | None, micro: int | None, steps: int | None, data: int) -> Batch | Problem:
    """The batch from any of its three numbers and the data-parallel degree.

    Two give the third. As in DeepSpeed, a global batch alone means one accumulation step, and a micro-batch alone too;
    accumulation steps alone mean a micro-batch of 1. Returns the problem where the numbers do not fit together.
    """
    if train is None:
        if micro is None and steps is None:
            return Problem(TRAIN, MISSING, f"give it, {MICRO} or {STEPS}; two of them determine the third")
        micro, steps = micro or 1, steps or 1
        return Batch(micro * steps * data, micro, steps)
    if train % data:
        rule = f"must be a multiple of the data-parallel degree {data} (world size / tensor / pipeline)"
        return Problem(TRAIN, train, rule, nearest(_multiples(train, data), train))
    per_rank = train // data
    if micro is not None and steps is not None:
        if micro * steps == per_rank:
            return Batch(train, micro, steps)
        product = micro * steps * data
        rule = f"must be {MICRO} {micro} x {STEPS} {steps} x data-parallel degree {data} = {product}"
        return Problem(TRAIN, train, rule, f"set it to {product}, or leave one of the three out")
    given, key, partner = (micro, MICRO, STEPS) if micro is not None else (steps, STEPS, MICRO)
    if given is None:
        return Batch(train, per_rank, 1)
    if per_rank % given:
        rule = f"must divide the {per_rank} samples of each data-parallel rank ({TRAIN} {train} / {data})"
        return Problem(key, given, rule, nearest(divisors(per_rank), given))
    other = per_rank // given
    return Batch(train, given, other) if partner == STEPS else Batch(train, other, given)


def _multiples(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [m for m in (below - unit, below, below + unit, below + 2 * unit) if m > 0]
