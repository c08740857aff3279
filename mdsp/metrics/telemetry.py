"""Telemetry: measures every step of a training run and hands the measurement to records, monitor and terminal."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import mdsp
from mdsp.config.run_config import RunConfig
from mdsp.directory_lock import DirectoryLock
from mdsp.errors import ConfigError
from mdsp.metrics.bubble import analyse_step
from mdsp.metrics.clock import estimate_clock_offset, gather_timeline
from mdsp.metrics.device_timeline import DeviceTimelineRecorder
from mdsp.metrics.devices import peak_flops_per_s
from mdsp.metrics.flops import hardware_flops, model_flops, tflops_per_device, utilization
from mdsp.metrics.gemm import measure_gemm_peak
from mdsp.metrics.memory import gather_peak_memory
from mdsp.metrics.monitor import Monitor, finish_wandb
from mdsp.metrics.record import RunRecorder, StepRecord
from mdsp.metrics.report import run_advice
from mdsp.metrics.run import read_run
from mdsp.metrics.timeline import Instruction, TimelineRecorder
from mdsp.model.table import parameter_table

if TYPE_CHECKING:
    from mdsp.checkpoint.training import Counters
    from mdsp.engine.engine import MdspEngine

MEASURED_PEAK = "measured GEMM peak"


class Telemetry:
    """One per rank. Stages gather timelines and memory over the pipeline of data rank 0 and tensor rank 0, whose first
    rank is rank 0 of the job; only that one writes."""

    def __init__(self, run: RunConfig, engine: MdspEngine) -> None:
        self.run = run
        self.engine = engine
        grid = engine.grid
        self._pipeline = grid.get_pipe_parallel_group()
        self._samples_pipeline = grid.get_data_parallel_rank() == 0 and engine.module.context.group.rank == 0
        self._writes = engine.global_rank == 0
        self._device = torch.device(engine.device)
        offset = estimate_clock_offset(None, self._device)
        self._recorder = (
            TimelineRecorder(engine.stage_id, engine.global_rank, offset)
            if self._device.type == "cpu"
            else DeviceTimelineRecorder(engine.stage_id, engine.global_rank, self._device, offset)
        )
        engine.recorder = self._recorder
        engine.module.context.group.traffic.recorder = self._recorder
        self.peak, self.peak_source = self._peak()
        self._monitor = Monitor(engine.monitor if self._writes else None)
        self._lock: DirectoryLock | None = None
        self._hold_directory()
        info = describe_run(run) | {"peak_flops_per_s": self.peak, "peak_source": self.peak_source}
        self.records = RunRecorder(run.mdsp.monitor.dir, info, enabled=self._writes)
        batch, seq = run.layout.global_batch, run.mdsp.data.seq_length
        self._model_flops = batch * model_flops(run.model, seq)
        self._hardware_flops = batch * hardware_flops(run.model, seq, run.mdsp.train.recompute)
        self._start = self._data_s = 0.0
        self._step = 0
        self._stall_s = self._checkpoint_s = 0.0

    def _hold_directory(self) -> None:
        """Refuse a directory that another job writes its records to: no reader could tell them apart. Collective."""
        problem: list[str | None] = [None]
        if self._writes:
            try:
                self._lock = DirectoryLock(Path(self.run.mdsp.monitor.dir), "mdsp.monitor.dir")
            except ConfigError as error:
                problem = [str(error)]
            except OSError:
                pass  # the first record that cannot be written warns of it
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise ConfigError(problem[0])

    def _peak(self) -> tuple[float, str]:
        """Peak matrix rate of this device in FLOP/s. Every rank measures at once where cores are shared. Collective."""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        known = peak_flops_per_s(name, self.run.precision)
        if known is not None:
            return known, name
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.run.precision]
        dist.barrier()
        return measure_gemm_peak(self._device, dtype, seconds=0.3), MEASURED_PEAK

    def start_step(self, step: int, stall_s: float) -> None:
        """Before the data of step number `step` (from 1) is asked for.

        `stall_s`: seconds for which saving has held up training so far; on every rank more than before if it has.
        """
        self._checkpoint_s, self._stall_s = stall_s - self._stall_s, stall_s
        interval = self.run.mdsp.monitor.timeline_interval
        # The second step is always recorded: the first one also pays for warm-up, and short runs see no other. So is
        # one that a checkpoint held up, which is rare and would hardly ever be met otherwise.
        if interval and (step % interval == 0 or step == 2 or self._checkpoint_s > 0):
            self._recorder.begin_step(self._checkpoint_s)
        self._step = step
        self._start = time.perf_counter()

    def data_ready(self) -> None:
        """The data of the step has come."""
        self._data_s = time.perf_counter() - self._start

    def finish_step(self, counters: Counters, loss: float, lr: float) -> StepRecord:
        """The step's record, not yet written. Collective over the sampled pipeline in steps with a timeline."""
        step_s = time.perf_counter() - self._start
        layout, engine = self.run.layout, self.engine
        instructions, memory = self._gather() if self._recorder.active else (None, ())
        norm = engine.get_global_grad_norm()
        record: dict[str, Any] = {}
        if instructions:
            bubble = analyse_step(instructions)
            record = {
                "bubble_measured": bubble.bubble,
                "bubble_parts_s": bubble.parts.as_dict(),
                "stage_busy_s": tuple(stage.busy_s for stage in bubble.stages),
                "stage_bubble": tuple(stage.bubble for stage in bubble.stages),
                "memory_bytes": memory,
            }
            self.records.timeline(counters.step, instructions)
        tokens = layout.global_batch * self.run.mdsp.data.seq_length
        return StepRecord(
            step=counters.step,
            loss=loss,
            lr=lr,
            step_s=step_s,
            tokens=counters.tokens,
            samples=counters.samples,
            tokens_per_s=tokens / step_s,
            samples_per_s=layout.global_batch / step_s,
            grad_norm=None if norm is None else float(norm),
            loss_scale=float(engine.optimizer.loss_scale) if self.run.precision == "fp16" else None,
            skipped=engine.skipped_steps,
            model_tflops_per_device=tflops_per_device(self._model_flops, step_s, layout.world_size),
            hardware_tflops_per_device=tflops_per_device(self._hardware_flops, step_s, layout.world_size),
            mfu=utilization(self._model_flops, step_s, layout.world_size, self.peak),
            hfu=utilization(self._hardware_flops, step_s, layout.world_size, self.peak),
            bubble_theory=layout.bubble,
            data_s=self._data_s,
            checkpoint_s=self._checkpoint_s or None,
            **record,
        )

    def write(self, record: StepRecord) -> None:
        """Hand a record to the files and the monitor."""
        self.records.step(record)
        if self._writes:
            self._monitor.step(record)

    def note(self, text: str) -> None:
        """Keep what was said to the terminal: checkpoints, warnings, roll-backs."""
        self.records.event("note", self._step, text=text)

    def advice(self) -> str | None:
        """What the measured bubble says should be changed; None on ranks that do not write, or when nothing should."""
        found = run_advice(read_run(self.records.directory)) if self._writes and self.records.enabled else None
        return None if found is None else found.sentence

    def close(self) -> None:
        """End the records and the chart."""
        self.records.close()
        if self._writes:
            finish_wandb()
        if self._lock is not None:
            self._lock.close()

    def _gather(self) -> tuple[list[Instruction] | None, tuple[int, ...]]:
        """Timeline and peak memory of every stage; the timeline only on the first."""
        instructions = self._recorder.end_step()
        if not self._samples_pipeline:
            return None, ()
        return gather_timeline(instructions, self._pipeline), gather_peak_memory(self._device, self._pipeline)


def describe_run(run: RunConfig) -> dict[str, Any]:
    """`run.json`: what was trained, how it was spread, and with which software."""
    return {
        "name": Path(run.mdsp.monitor.dir).name,
        "model": run.model.model_dump(),
        "parameters": parameter_table(run.model).numel,
        "layout": asdict(run.layout),
        "precision": run.precision,
        "schedule": "1f1b",
        "deepspeed": run.deepspeed,
        "mdsp": run.mdsp.model_dump(),
        "environment": {
            "python": platform.python_version(),
            "host": platform.node(),
            "torch": torch.__version__,
            "deepspeed": importlib.metadata.version("deepspeed"),
            "mdsp": mdsp.__version__,
        },
    }
