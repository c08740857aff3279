"""Run directories for the tests, written by the real recorder from simulated pipelines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from mdsp.metrics.bubble import StepBubble, analyse_step
from mdsp.metrics.record import RunRecorder, StepRecord
from mdsp.metrics.timeline import Instruction
from tests.metrics.simulator import simulate_1f1b


def step_record(step: int, **changes: Any) -> StepRecord:
    """A plausible record; `changes` are its fields."""
    plain = StepRecord(
        step=step,
        loss=2.0 + 6.0 * math.exp(-step / 20),
        lr=3e-4 * min(1.0, step / 5),
        step_s=1.25,
        tokens=8192 * step,
        samples=8 * step,
        tokens_per_s=6553.6,
        samples_per_s=6.4,
        grad_norm=1.0 + 1.0 / step,
        loss_scale=1.0,
        skipped=0,
        model_tflops_per_device=101.5,
        hardware_tflops_per_device=134.25,
        mfu=0.325,
        hfu=0.43,
        bubble_theory=0.3,
        data_s=0.0125,
        checkpoint_s=0.25,
    )
    return replace(plain, **changes)


def timeline(stages: int, micro_batches: int, slow: int | None = None, unit: float = 0.01) -> list[Instruction]:
    """A step of simulated 1F1B with an optimizer at its end; stage `slow` takes 1.5 times as long."""
    scale = [1.5 if stage == slow else 1.0 for stage in range(stages)]
    found = simulate_1f1b([unit * x for x in scale], [2 * unit * x for x in scale], micro_batches)
    end = max(i.end_s for i in found)
    for stage in range(stages):
        mine = max(i.end_s for i in found if i.stage == stage)
        found.append(Instruction(stage, stage, "reduce_tied", -1, mine, end + unit))
        found.append(Instruction(stage, stage, "reduce_grads", -1, end + unit, end + 3 * unit))
        found.append(Instruction(stage, stage, "optimizer", -1, end + 3 * unit, end + 5 * unit))
    return found


def with_bubble(record: StepRecord, bubble: StepBubble) -> StepRecord:
    return replace(
        record,
        bubble_measured=bubble.bubble,
        bubble_theory=bubble.theory,
        bubble_parts_s=bubble.parts.as_dict(),
        stage_busy_s=tuple(s.busy_s for s in bubble.stages),
        stage_bubble=tuple(s.bubble for s in bubble.stages),
        memory_bytes=tuple(10**9 * (3 + s.stage) for s in bubble.stages),
    )


def write_run(
    directory: Path, stages: int = 4, micro_batches: int = 8, steps: int = 30, slow: int | None = None, every: int = 10
) -> Path:
    """A run of `steps` steps with a timeline every `every` steps and an evaluation every 15."""
    info = dict(
        name=directory.name,
        deepspeed={"train_batch_size": 8},
        mdsp={"parallel": {"tensor": 1, "pipeline": stages}},
        layout=dict(
            tensor=1,
            pipeline=stages,
            data=1,
            gradient_accumulation_steps=micro_batches,
            blocks_per_stage=[3] * stages,
        ),
        parameters=123_456_789,
        environment=dict(python="3.11", device="<cpu> & more"),
    )
    recorder = RunRecorder(directory, info)
    for step in range(1, steps + 1):
        record = step_record(step)
        if step % every == 0:
            instructions = timeline(stages, micro_batches, slow)
            recorder.timeline(step, instructions)
            record = with_bubble(record, analyse_step(instructions))
        if step % 15 == 0:
            record = replace(record, eval_loss=record.loss + 0.1)
        recorder.step(record)
    recorder.event("checkpoint", steps, path=f"global_step{steps}")
    recorder.close()
    return directory
