"""A plan as JSON: the same numbers as on the terminal, in SI units."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from mdsp.plan.models import NamedModel
from mdsp.plan.reasons import TERMS, expected_layouts, nearest_better, shortage
from mdsp.plan.search import Candidate, Plan, parameters_on, stage_memory


def candidate_dict(plan: Plan, candidate: Candidate, tokens: float | None = None) -> dict[str, Any]:
    """One layout."""
    layout = candidate.layout
    found = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "micro_batch": layout.micro_batch,
        "micro_batches": candidate.time.micro_batches,
        "recompute": layout.recompute,
        "sequence_parallel": layout.sequence_parallel,
        "zero_stage": layout.zero,
        "blocks_per_stage": list(layout.blocks_per_stage),
        "step_s": candidate.seconds,
        "step_low_s": candidate.seconds / (1 + plan.band),
        "step_high_s": candidate.seconds * (1 + plan.band),
        "step_parts_s": {name: getattr(candidate.time, name) for name in TERMS},
        "tokens_per_s": plan.tokens_per_s(candidate),
        "model_tflops_per_device": plan.tflops_per_device(candidate),
        "mfu": plan.mfu(candidate),
        "bubble_theory": plan.bubble(candidate),
        "bubble_predicted": candidate.time.bubble_share,
        "memory_bytes": candidate.memory.total,
        "memory_stage": candidate.stage,
        "memory_parts_bytes": candidate.memory.parts(),
        "fits": candidate.fits,
    }
    if tokens:
        found["days"] = plan.seconds_for(candidate, tokens) / 86400
        found["device_hours"] = plan.device_hours(candidate, tokens)
    return found


def _head(model: NamedModel, plan: Plan) -> dict[str, Any]:
    work, cluster = plan.workload, plan.cluster
    return {
        "model": model.name,
        "parameters": model.parameters,
        "cluster": {
            "device": asdict(cluster.device),
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
        },
        "devices": cluster.devices,
        "global_batch": work.global_batch,
        "seq_length": work.seq_length,
        "precision": work.precision,
        "band": plan.band,
    }


def plan_json(model: NamedModel, plan: Plan, top: int, tokens: float | None) -> str:
    """The fastest layouts, why others are not chosen, and the stages of the best."""
    best = plan.fitting[0]
    return json.dumps(
        _head(model, plan)
        | {
            "layouts": [candidate_dict(plan, c, tokens) for c in plan.distinct[:top]],
            "fitting": len(plan.distinct),
            "not_fitting": len(plan.failing),
            "not_chosen": [asdict(reason) for reason in expected_layouts(plan)],
            "stages": _stages(plan, best),
        },
        indent=2,
    )


def explain_json(model: NamedModel, plan: Plan, candidate: Candidate) -> str:
    """One configuration's layout, its stages, and the nearest better layouts."""
    better = nearest_better(plan, candidate.layout, candidate.seconds if candidate.fits else float("inf"))
    return json.dumps(
        _head(model, plan)
        | {
            "layout": candidate_dict(plan, candidate),
            "short_of": None if candidate.fits else shortage(plan, candidate),
            "stages": _stages(plan, candidate),
            "better": [candidate_dict(plan, c) for c in better],
        },
        indent=2,
    )


def _stages(plan: Plan, candidate: Candidate) -> list[dict[str, Any]]:
    return [
        {
            "stage": stage,
            "parameters_per_rank": parameters_on(plan, candidate, stage),
            "memory_bytes": memory.total,
            "memory_parts_bytes": memory.parts(),
            "micro_batch_s": candidate.time.stage_seconds[stage],
        }
        for stage, memory in enumerate(stage_memory(plan, candidate))
    ]
