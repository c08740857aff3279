"""MdspEngine: DeepSpeed's PipelineEngine with the numbers' contract of mdsp and a timeline of what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from mdsp.tensor_parallel.random import Moment

if TYPE_CHECKING:
    from mdsp.engine.module import PipelineGPT


class MdspEngine(PipelineEngine):
    """Adds to the engine: the moment for dropout, and the sum of partial gradients over the tensor group."""

    module: PipelineGPT

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        self._forwards = 0
        super()._exec_schedule(pipe_schedule)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.module._context.streams.moment = Moment(self.global_steps, self._forwards)
        self._forwards += 1
        super()._exec_forward_pass(buffer_id)

    def _exec_reduce_grads(self) -> None:
        self._sum_partial_grads()
        super()._exec_reduce_grads()

    def _sum_partial_grads(self) -> None:
        """Sum, over the tensor group, gradients of replicated parameters that each rank computed only in part.

        Norms under sequence parallelism see a slice of the sequence; replicated key/value heads see a part of the
        queries. One flat all-reduce per dtype.
        """
        group = self.module._context.group
        if group.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.module.parameters():
            if parameter.entry.has_partial_grad(group.size, group.sequence_parallel):
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
            raise RuntimeError(f"no gradient for {parameter.entry.name}")  # type: ignore[attr-defined]
        return grad

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.ReduceGrads: _exec_reduce_grads,
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
