"""What follows from a configuration, in a few lines: layout, batch, stages, model."""

from __future__ import annotations

import dataclasses
import json

from mdsp.config.run_config import RunConfig
from mdsp.model.table import parameter_table


def as_table(run: RunConfig) -> str:
    """The resolved run for a terminal."""
    layout, model, data = run.layout, run.model, run.mdsp.data
    blocks = ", ".join(map(str, layout.blocks_per_stage))
    tokens = layout.global_batch * data.seq_length
    parallel = "on" if run.mdsp.parallel.sequence_parallel else "off"
    batch = (
        f"{layout.global_batch} = micro-batch {layout.micro_batch} x accumulation "
        f"{layout.gradient_accumulation_steps} x data {layout.data}"
    )
    rows = [
        ("model", f"{model.family}, {model.n_layers} blocks x {model.hidden_size}, {model.n_heads} heads"),
        ("parameters", f"{parameter_table(model).numel:,}"),
        ("ranks", f"{layout.world_size} = tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"),
        ("sequence parallel", parallel),
        ("blocks per stage", blocks),
        ("global batch", batch),
        ("tokens per step", f"{tokens:,} (sequences of {data.seq_length:,})"),
        ("training tokens", f"{tokens * run.mdsp.train.steps:,} in {run.mdsp.train.steps:,} steps"),
        ("pipeline bubble", f"{layout.bubble:.1%} = (P - 1) / (M + P - 1)"),
        ("precision", f"{run.precision}, ZeRO stage {run.deepspeed['zero_optimization']['stage']}"),
        ("recompute", run.mdsp.train.recompute),
        ("optimizer", f"{run.deepspeed['optimizer']['type']}, clipped at {run.deepspeed['gradient_clipping']:g}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def as_json(run: RunConfig) -> str:
    """The resolved run for a program."""
    content = {
        "deepspeed": run.deepspeed,
        "mdsp": run.mdsp.model_dump(mode="json"),
        "model": run.model.model_dump(mode="json"),
        "layout": dataclasses.asdict(run.layout),
        "precision": run.precision,
    }
    return json.dumps(content, indent=2)
