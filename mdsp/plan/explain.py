"""An existing configuration in the planner's terms."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from mdsp.config.load import resolve_run_config
from mdsp.config.read import read_json
from mdsp.config.run_config import RunConfig
from mdsp.errors import ConfigError
from mdsp.plan.calibrate import Efficiencies
from mdsp.plan.hardware import Cluster
from mdsp.plan.layout import Layout, Precision, Software, Workload, mdsp_software
from mdsp.plan.models import NamedModel
from mdsp.plan.search import Candidate, Plan, evaluate, search


def workload_of(run: RunConfig) -> Workload:
    """What a configuration computes per step."""
    return Workload(run.model, run.mdsp.data.seq_length, run.layout.global_batch, cast(Precision, run.precision))


def layout_of(run: RunConfig) -> Layout:
    """How a configuration is spread."""
    layout = run.layout
    return Layout(
        layout.tensor, layout.pipeline, layout.data, layout.micro_batch, run.mdsp.train.recompute,
        run.mdsp.parallel.sequence_parallel, int(run.deepspeed["zero_optimization"]["stage"]),
        blocks_per_stage=tuple(layout.blocks_per_stage),
    )  # fmt: skip


def software_of(run: RunConfig) -> Software:
    """The program that runs it."""
    return mdsp_software(cast(Precision, run.precision))


def explained_config(path: str, cluster: Cluster, efficiencies: Efficiencies) -> tuple[NamedModel, Plan, Candidate]:
    """The plan of the same model and batch, and the configuration's own layout, evaluated."""
    document = read_json(path)
    run = resolve_run_config(document, cluster.devices, source=path)
    work, software = workload_of(run), software_of(run)
    candidate = evaluate(work, layout_of(run), cluster, software, efficiencies.constants)
    try:
        plan = search(work, cluster, efficiencies.constants, efficiencies.band, software=software)
    except ConfigError:
        plan = Plan(work, cluster, software, efficiencies.constants, efficiencies.band, (candidate,), ())
    section = document["mdsp"]["model"]
    return NamedModel(Path(path).stem, run.model, dict(section)), plan, candidate
