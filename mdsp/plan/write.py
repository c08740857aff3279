"""The DeepSpeed JSON that runs a planned layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mdsp.config.load import resolve_run_config
from mdsp.output_file import write_output
from mdsp.plan.models import NamedModel
from mdsp.plan.search import Candidate, Plan


def config_document(model: NamedModel, plan: Plan, candidate: Candidate) -> dict[str, Any]:
    """The configuration: layout, batch, precision and recomputation of the plan; data and schedule are to fill in."""
    layout, work = candidate.layout, plan.workload
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": candidate.time.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": layout.zero},
        "gradient_clipping": 1.0,
    }
    if work.precision in ("bf16", "fp16"):
        document[work.precision] = {"enabled": True}
    document["mdsp"] = {
        "model": model.section,
        "parallel": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "sequence_parallel": layout.sequence_parallel,
            "blocks_per_stage": list(layout.blocks_per_stage),
        },
        "data": {"seq_length": work.seq_length},
        "train": {"recompute": layout.recompute},
    }
    return document


def write_config(path: str, model: NamedModel, plan: Plan, candidate: Candidate) -> None:
    """Write the configuration, after checking that it is legal on the planned number of devices."""
    document = config_document(model, plan, candidate)
    resolve_run_config(document, plan.cluster.devices, source=path)
    write_output(Path(path), json.dumps(document, indent=2) + "\n")
