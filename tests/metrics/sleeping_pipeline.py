"""DeepSpeed's real pipeline engine with stages that sleep instead of computing: eight fit on two cores."""

from __future__ import annotations

import contextlib
import io
import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from mdsp.engine.engine import MdspEngine, engine_class
from mdsp.metrics.clock import estimate_clock_offset, gather_timeline
from mdsp.metrics.timeline import Instruction, TimelineRecorder
from mdsp.model.config import ModelConfig
from mdsp.model.context import ModelContext
from tests.metrics.simulator import simulate_1f1b

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """One step to measure."""

    micro_batches: int
    forward_s: float
    backward_s: float
    slow_stage: int = -1
    """Takes 1.5 times as long."""
    delayed_sender: int = -1
    """Sleeps `delay_s` in every send of activations, before it sends."""
    delay_s: float = 0.0

    def length(self, stages: int) -> float:
        """Seconds that the passes of the step take on this many stages, as simulated."""
        scale = [1.5 if stage == self.slow_stage else 1.0 for stage in range(stages)]

        def delay(stage: int, kind: str, micro_batch: int) -> float:
            return self.delay_s if stage == self.delayed_sender and kind == "activation" else 0.0

        forward, backward = ([base * x for x in scale] for base in (self.forward_s, self.backward_s))
        return length(simulate_1f1b(forward, backward, self.micro_batches, delay))


def length(timeline: list[Instruction]) -> float:
    """Seconds from the first to the last pass."""
    passes = [i for i in timeline if i.kind in ("forward", "backward")]
    return max(i.end_s for i in passes) - min(i.start_s for i in passes)


@dataclass
class Durations:
    """What the sleeping layer of this rank does; changed from step to step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    send_s: float = 0.0


class Sleep(torch.autograd.Function):
    """y = x * weight, after a sleep each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, durations: Durations) -> Tensor:
        time.sleep(durations.forward_s)
        ctx.save_for_backward(x, weight)
        ctx.durations = durations
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.durations.backward_s)
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum().reshape(1), None


class SleepingLayer(nn.Module):
    def __init__(self, durations: Durations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.durations = durations

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self.durations)


class SleepingPipeline(PipelineModule):
    def __init__(self, stages: int, durations: Durations) -> None:
        self.durations = durations
        self.context = ModelContext(ModelConfig(n_layers=1, hidden_size=8, n_heads=1, vocab_size=8))
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                layers=[LayerSpec(SleepingLayer, durations) for _ in range(stages)],
                num_stages=stages,
                loss_fn=lambda output, label: (output - label).square().mean(),
                partition_method="uniform",
            )


class SleepingEngine(MdspEngine):
    durations: Durations

    def _exec_send_activations(self, buffer_id: int) -> None:
        time.sleep(self.durations.send_s)
        super()._exec_send_activations(buffer_id)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **MdspEngine._INSTRUCTION_MAP,
        deepspeed.runtime.pipe.schedule.SendActivation: _exec_send_activations,
    }

    def take(self, setting: Setting) -> list[Instruction] | None:
        """One step; its timeline on the first stage's rank."""
        stage, stages, durations = self.stage_id, self.num_stages, self.durations
        slower = 1.5 if setting.slow_stage == stage else 1.0
        durations.forward_s = setting.forward_s * slower
        durations.backward_s = setting.backward_s * slower
        durations.send_s = setting.delay_s if setting.delayed_sender == stage else 0.0
        self.micro_batches = setting.micro_batches
        ends = stage in (0, stages - 1)
        batches = iter([(torch.ones(4), torch.ones(4))] * setting.micro_batches) if ends else None
        assert self.recorder is not None
        dist.barrier()
        self.recorder.begin_step()
        self.train_batch(batches)
        return gather_timeline(self.recorder.end_step(), None)


def run_before_other_work() -> None:
    """Have the scheduler prefer this process's threads, where that is allowed: they sleep, and must wake up in time."""
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def measure(settings: list[Setting]) -> list[list[Instruction]]:
    """The timeline of one step per setting, on the first rank. One rank is one stage.

    Other work on the machine can only make a step longer. One that took over 3 % more than its setting asks for (12 %
    with delayed sends: gloo's also wait for the receiver, which the simulation leaves out) is taken again, three times
    at most, and the shortest is kept.
    """
    stages, stage = dist.get_world_size(), dist.get_rank()
    module = SleepingPipeline(stages, Durations())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with engine_class(SleepingEngine):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    assert isinstance(engine, SleepingEngine)
    engine.durations = module.durations
    engine.recorder = TimelineRecorder(stage, stage, estimate_clock_offset(None, CPU))
    engine.take(Setting(2, 0.0, 0.0))  # pays for connections
    run_before_other_work()
    kept: list[list[Instruction]] = []
    for setting in settings:
        attempts: list[list[Instruction]] = []
        limit = (1.12 if setting.delay_s else 1.03) * setting.length(stages)
        again = torch.ones(1)
        while again:
            timeline = engine.take(setting)
            if timeline is not None:
                attempts.append(timeline)
                again[0] = float(length(timeline) > limit and len(attempts) < 3)
            dist.broadcast(again, 0)
        if attempts:
            kept.append(min(attempts, key=length))
    return kept
