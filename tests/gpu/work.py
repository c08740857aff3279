"""What the GPU tests run on their ranks. Imports nothing that decides the accelerator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from mdsp.engine.build import build_engine
from mdsp.metrics.device_timeline import timeline_recorder
from mdsp.metrics.timeline import Instruction
from tests.checkpoint import jobs
from tests.engine.ranks import Case, Chunks, local_weights, micro_batches, own_groups
from tests.engine.reference import global_batch
from tests.model.hf_models import Tensors


def curve(
    case: Case, fields: dict[str, Any], initial: Tensors, steps: int
) -> tuple[list[float], list[bool], list[float], Tensors]:
    """(losses, whether each step was applied, loss scales, last weights) on two batches in turn."""
    with own_groups():
        engine = build_engine(case.run_config(fields), Chunks(initial, fields))
        _, data_rank, _ = case.layout.place(dist.get_rank())
        losses, applied, scales = [], [], []
        for step in range(steps):
            batch = global_batch(fields["vocab_size"], step % 2)
            found = engine.train_batch(micro_batches(batch, case.micro_batches, case.layout.data, data_rank))
            losses.append(float(found))
            applied.append(bool(engine.was_step_applied()))
            scales.append(float(getattr(engine.optimizer, "loss_scale", 1.0)))
        result = losses, applied, scales, local_weights(engine)
        engine.destroy()
    return result


def interrupted(layout: jobs.Layout, directory: str, steps: int, stop: int) -> tuple[jobs.Outcome, jobs.Outcome]:
    """`steps` steps undisturbed, and the same with a checkpoint and a new engine after `stop` of them."""
    with own_groups():
        whole = jobs.train(layout, None, steps)
        first = jobs.train(layout, directory, stop, save_at=(stop,))
        second = jobs.train(layout, directory, steps, resume="auto")
    return whole, replace(second, losses=first.losses + second.losses)


def sleeping_step(micro_batches_: int, cycles: int) -> tuple[list[Instruction], float, float]:
    """One step whose only layer spins for `cycles` of the device's clock each way.

    Returns the timeline, and by events of this function's own: seconds of one spin, and of the whole step.
    """
    import deepspeed

    from mdsp.engine.engine import MdspEngine, engine_class
    from tests.metrics import sleeping_pipeline as sleeping

    device = torch.device(get_accelerator().current_device_name())
    spin = torch.cuda._sleep

    def timed(work: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    spin(cycles)
    one = min(timed(lambda: spin(cycles)) for _ in range(5))

    class Spin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            spin(cycles)
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            spin(2 * cycles)
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum().reshape(1)

    class Layer(sleeping.SleepingLayer):
        def forward(self, x: Tensor) -> Tensor:
            return Spin.apply(x, self.weight)

    original, sleeping.SleepingLayer = sleeping.SleepingLayer, Layer  # type: ignore[misc]
    module = sleeping.SleepingPipeline(1, sleeping.Durations())
    sleeping.SleepingLayer = original  # type: ignore[misc]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches_,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with engine_class(MdspEngine):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.recorder = timeline_recorder(0, 0, device)
    one_batch = (torch.ones(4), torch.ones(4))
    engine.train_batch(iter([one_batch] * micro_batches_))
    engine.recorder.begin_step()
    whole = timed(lambda: engine.train_batch(iter([one_batch] * micro_batches_)))
    return engine.recorder.end_step(), one, whole


def attention_kernels(precision: str) -> list[str]:
    """Names of the device's kernels in one training step of a small model."""
    layout = jobs.Layout(precision=precision)
    engine = build_engine(jobs.run_config(layout))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.train_batch(jobs.micro_batches(engine, 0))
    return sorted({event.key for event in profile.key_averages()})


def reductions() -> float:
    """Largest error of a sum over the ranks: the communicator works."""
    mine = torch.full((1000,), float(dist.get_rank() + 1), device=get_accelerator().current_device_name())
    dist.all_reduce(mine)
    size = dist.get_world_size()
    return float((mine - size * (size + 1) / 2).abs().max()) + float(F.relu(mine).isnan().any())
