"""MdspEngine: DeepSpeed's PipelineEngine with the numbers' contract of mdsp and a timeline of what it does."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from mdsp.metrics.timeline import NO_MICRO_BATCH, InstructionKind, TimelineRecorder
from mdsp.tensor_parallel.parameters import entry_of
from mdsp.tensor_parallel.random import Moment

if TYPE_CHECKING:
    from mdsp.engine.loss_guard import LossGuard
    from mdsp.engine.module import PipelineGPT


KINDS: dict[type[schedule.PipeInstruction], InstructionKind] = {
    schedule.LoadMicroBatch: "load",
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.SendActivation: "send_activation",
    schedule.RecvActivation: "recv_activation",
    schedule.SendGrad: "send_grad",
    schedule.RecvGrad: "recv_grad",
    schedule.ReduceTiedGrads: "reduce_tied",
    schedule.ReduceGrads: "reduce_grads",
    schedule.OptimizerStep: "optimizer",
}


@dataclass(slots=True)
class Progress:
    """The instruction that a rank is executing, for whoever watches it from another thread."""

    kind: InstructionKind | None = None
    micro_batch: int = NO_MICRO_BATCH
    since: float = 0.0
    """When it began, seconds of `time.monotonic`."""


class MdspEngine(PipelineEngine):
    """Adds to the engine: the moment for dropout, the sum of partial gradients over the tensor group, a timeline."""

    module: PipelineGPT
    recorder: TimelineRecorder | None = None
    """Told about every instruction; set by whoever wants a timeline."""
    progress: Progress
    """What is being executed now."""
    loss_guard: LossGuard | None = None
    """Asked before every optimizer step, when it wants to know the loss by then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # the signature is DeepSpeed's
        self.progress = Progress()
        super().__init__(*args, **kwargs)

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs: list[Tensor] = []
        executed: Counter[InstructionKind] = Counter()
        recorder, progress = self.recorder, self.progress
        for commands in pipe_schedule:
            for command in commands:
                kind = KINDS[type(command)]
                # Within a stage every kind of instruction meets the micro-batches in order.
                micro_batch = executed[kind] if isinstance(command, schedule.BufferOpInstruction) else NO_MICRO_BATCH
                executed[kind] += 1
                progress.kind, progress.micro_batch, progress.since = kind, micro_batch, time.monotonic()
                if recorder is not None:
                    recorder.start(kind, micro_batch)
                self._INSTRUCTION_MAP[type(command)](self, **command.kwargs)
                if recorder is not None:
                    recorder.stop()
        progress.kind = None

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        guard = self.loss_guard
        if guard is not None and guard.looks_ahead and guard.rejects(float(self._aggregate_total_loss())) is not None:
            self._invalidate_gradients()
        super()._exec_optimizer_step(lr_kwargs)

    def _invalidate_gradients(self) -> None:
        """Make the optimizer leave this step out in its own way, on all ranks: a norm of NaN."""
        if self.using_bf16_optimizer:
            self.optimizer.fp32_groups_gradients_flat[0].fill_(float("nan"))
            return
        for grads in self.optimizer.averaged_gradients.values():
            for grad in grads or ():
                grad.fill_(float("nan"))

    def _copy_recovery_script(self, save_path: str) -> None:
        """Checkpoints hold data only; DeepSpeed would put two Python scripts beside them."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.module.context.streams.moment = Moment(self.global_steps, self.progress.micro_batch)
        super()._exec_forward_pass(buffer_id)

    def _exec_reduce_grads(self) -> None:
        self._sum_partial_grads()
        super()._exec_reduce_grads()

    def _sum_partial_grads(self) -> None:
        """Sum, over the tensor group, gradients of replicated parameters that each rank computed only in part.

        Norms under sequence parallelism see a slice of the sequence; replicated key/value heads see a part of the
        queries. One flat all-reduce per dtype.
        """
        group = self.module.context.group
        if group.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.module.parameters():
            if entry_of(parameter).has_partial_grad(group.size, group.sequence_parallel):
                grad = self._gradient(parameter)
                by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group.process_group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Where the accumulated gradient of a parameter lies before it is reduced over data ranks."""
        grad = parameter._hp_grad if self.using_bf16_optimizer else parameter.grad  # type: ignore[attr-defined]
        if grad is None:
            raise RuntimeError(f"no gradient for {entry_of(parameter).name}")
        return grad

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.OptimizerStep: _exec_optimizer_step,
    }


@contextlib.contextmanager
def engine_class(cls: type[PipelineEngine]) -> Iterator[None]:
    """`deepspeed.initialize` builds `cls` inside this context: it looks the class up by name in its own module."""
    original: Any = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = cls
    try:
        yield
    finally:
        deepspeed.PipelineEngine = original
