"""The predicted timeline is 1F1B."""

from __future__ import annotations

import pytest

from mdsp.plan.constants import default_constants
from mdsp.plan.hardware import parse_cluster
from mdsp.plan.layout import MDSP, Layout, Workload
from mdsp.plan.models import named_model
from mdsp.plan.search import evaluate
from mdsp.plan.timeline import one_f_one_b, predicted_timeline, span


def test_order_of_a_stage() -> None:
    assert one_f_one_b(1, 3, 3) == [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("forward", 2),
        ("backward", 1),
        ("backward", 2),
    ]
    assert one_f_one_b(2, 3, 2) == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


@pytest.mark.parametrize(("pipeline", "batch"), [(1, 4), (2, 8), (4, 4), (8, 64)])
def test_span_is_that_of_theory(pipeline: int, batch: int) -> None:
    """With equal stages (M + P - 1) (F + B); unequal ones: m t_max + the rest of one pass, as in the model."""
    work = Workload(named_model("megatron-7.5b"), 2048, batch)
    layout = Layout(1, pipeline, 1, recompute="full")
    candidate = evaluate(work, layout, parse_cluster(f"1x{pipeline}xA100"), MDSP, default_constants().constants)
    seconds = candidate.time.stage_seconds
    passes = predicted_timeline(candidate)
    assert len(passes) == 2 * pipeline * batch
    assert span(passes) == pytest.approx(batch * max(seconds) + sum(seconds) - max(seconds), rel=0.02)
    for one in passes:
        clash = [
            o
            for o in passes
            if o.stage == one.stage and o is not one and o.start_s < one.end_s - 1e-12 and one.start_s < o.end_s - 1e-12
        ]
        assert not clash
