"""From a RunConfig to a DeepSpeed engine: groups, model, optimizer, `deepspeed.initialize`."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from mdsp.config.run_config import RunConfig
from mdsp.engine.engine import MdspEngine, engine_class
from mdsp.engine.module import PipelineGPT
from mdsp.engine.optimizer import build_optimizer
from mdsp.model.context import ModelContext
from mdsp.model.table import parameter_table
from mdsp.tensor_parallel.parameters import ParameterBuilder, RandomWeights, WeightSource
from mdsp.tensor_parallel.random import DropoutStreams
from mdsp.topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_engine(run: RunConfig, source: WeightSource | None = None, cls: type[MdspEngine] = MdspEngine) -> MdspEngine:
    """The engine that trains `run.model` at `run.layout`. Collective; torch.distributed must be initialised.

    Args:
        run: the checked configuration.
        source: values of the weights; drawn from `train.seed` when None.
        cls: the engine class to build.
    """
    train, layout = run.mdsp.train, run.layout
    topology = Topology(layout.tensor, layout.pipeline, layout.data)
    rank = dist.get_rank()
    here = topology.coordinates(rank)
    group = topology.tensor_group(rank, run.mdsp.parallel.sequence_parallel)
    context = ModelContext(
        config=run.model,
        group=group,
        streams=DropoutStreams(train.seed, here.data, here.tensor),
        recompute=train.recompute,
        recompute_interval=train.recompute_interval,
    )
    builder = ParameterBuilder(
        table=parameter_table(run.model),
        group=group,
        source=source or RandomWeights(train.seed),
        dtype=DTYPES[run.precision],
        device=torch.device(get_accelerator().current_device_name()),
    )
    module = PipelineGPT(builder, context, topology, layout.blocks_per_stage)
    optimizer = build_optimizer(run.deepspeed["optimizer"], module.parameters())
    settings = {key: value for key, value in run.deepspeed.items() if key != "optimizer"}
    with engine_class(cls):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    assert isinstance(engine, cls)
    return engine


def weight_source(run: RunConfig) -> WeightSource | None:
    """Where the configuration says the weights come from: a Hugging Face directory, or (None) a random draw."""
    directory = run.mdsp.model.get("from_hf")
    if directory is None:
        return None
    from mdsp.checkpoint.weights import HfWeights

    return HfWeights(Path(directory))
