"""From the JSON file and the command line to a RunConfig: read, override, type, resolve, check, fill in."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mdsp.config.batch import Batch
from mdsp.config.deepspeed_rules import OPTIMIZERS
from mdsp.config.deepspeed_schema import RunFile
from mdsp.config.keys import problems_of
from mdsp.config.model_section import resolve_model
from mdsp.config.problems import MOST_RANKS, Problem, refuse
from mdsp.config.read import apply_overrides, read_json
from mdsp.config.rules import batch_of, broken
from mdsp.config.run_config import Layout, RunConfig
from mdsp.config.stages import stage_blocks
from mdsp.config.view import View
from mdsp.errors import ConfigError

__all__ = ["Layout", "RunConfig", "load_run_config", "resolve_run_config"]

PRACTICALLY_NEVER = 1_000_000_000
"""Steps between DeepSpeed's own log lines. Its pipeline engine divides by this number, so it cannot be left out."""


def load_run_config(path: str | Path, overrides: Sequence[str], world_size: int) -> RunConfig:
    """The checked configuration in a file, with `a.b=value` overrides, for a number of ranks.

    Needs neither torch nor DeepSpeed. Raises ConfigError that lists every problem, one line each.
    """
    document = read_json(path)
    apply_overrides(document, overrides)
    return resolve_run_config(document, world_size, source=str(path))


def resolve_run_config(document: dict[str, Any], world_size: int, source: str = "configuration") -> RunConfig:
    """The same for data that is already in memory; `source` begins the message of the error."""
    if world_size < 1:
        raise ConfigError(f"the number of ranks is {world_size}; it must be at least 1")
    if world_size > MOST_RANKS:
        raise ConfigError(f"the number of ranks is {world_size}; it must be at most {MOST_RANKS:,}")
    # null means "not set" at the top level, so that an override can take a section away.
    document = {key: copy.deepcopy(value) for key, value in document.items() if value is not None}
    problems: list[Problem] = []
    file = None
    try:
        file = RunFile.model_validate(document, strict=True)
    except ValidationError as error:
        problems += problems_of(error, RunFile)
    model, model_problems = _model(document)
    problems += model_problems
    refuse(source, problems if file is None else [])
    assert file is not None
    view = View(file, model, world_size, installed_deepspeed())
    refuse(source, problems + broken(view))
    assert model is not None and view.data is not None
    batch = batch_of(view)
    assert isinstance(batch, Batch)
    layout = Layout(
        tensor=view.tensor,
        pipeline=view.pipeline,
        data=view.data,
        micro_batch=batch.micro_batch,
        gradient_accumulation_steps=batch.accumulation,
        global_batch=batch.global_batch,
        blocks_per_stage=stage_blocks(model, file.mdsp.parallel, file.mdsp.data.seq_length, file.mdsp.train.recompute),
    )
    return RunConfig(_fill_in(document, view, batch), file.mdsp, model, layout, view.precision)


def _model(document: dict[str, Any]) -> Any:
    section = document.get("mdsp")
    section = section.get("model") if isinstance(section, dict) else None
    # Anything but an object is reported by the schema.
    return resolve_model(section) if isinstance(section, dict) else (None, [])


@functools.cache
def installed_deepspeed() -> str | None:
    """Version of the installed DeepSpeed, read without importing it; None when there is none."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def _fill_in(document: dict[str, Any], view: View, batch: Batch) -> dict[str, Any]:
    """DeepSpeed's keys with the batch resolved and the defaults that training needs. What the user set, stays."""
    filled = {key: _without_nulls(value) for key, value in document.items() if key != "mdsp"}
    filled["train_batch_size"] = batch.global_batch
    filled["train_micro_batch_size_per_gpu"] = batch.micro_batch
    filled["gradient_accumulation_steps"] = batch.accumulation
    filled.setdefault("gradient_clipping", view.file.gradient_clipping)
    filled.setdefault("steps_per_print", PRACTICALLY_NEVER)
    filled.setdefault("zero_optimization", {}).setdefault("stage", view.file.zero_optimization.stage)
    filled.setdefault("zero_allow_untested_optimizer", True)
    name, _ = OPTIMIZERS[view.file.optimizer.type.lower()]
    filled["optimizer"]["type"] = name
    params = filled["optimizer"].setdefault("params", {})
    if name != "SGD":
        params.setdefault("torch_adam", True)
    if view.precision == "bf16":
        # Without it DeepSpeed accumulates gradients in bf16.
        filled.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    pipeline = filled.setdefault("pipeline", {})
    pipeline.setdefault("use_reentrant", False)
    if view.mdsp.parallel.sequence_parallel:
        pipeline.setdefault("pipe_partitioned", False)
        pipeline.setdefault("grad_partitioned", False)
    return filled


def _without_nulls(value: Any) -> Any:
    """A section without the keys that are null: here they mean "not set", and DeepSpeed would trip over them."""
    return {key: _without_nulls(v) for key, v in value.items() if v is not None} if isinstance(value, dict) else value
