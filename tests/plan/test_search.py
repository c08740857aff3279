"""The search finds legal layouts only, all of them, in order; what it writes is a configuration that loads."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.config.load import resolve_run_config
from mdsp.errors import ConfigError
from mdsp.metrics.flops import model_flops_per_token
from mdsp.model.config import ModelConfig
from mdsp.plan.constants import default_constants
from mdsp.plan.hardware import parse_cluster
from mdsp.plan.layout import Workload
from mdsp.plan.models import find_model, named_model
from mdsp.plan.plot import pareto_front
from mdsp.plan.reasons import expected_layouts, nearest_better, what_would_fit
from mdsp.plan.search import MICRO_BATCHES, USABLE, Limits, Plan, search
from mdsp.plan.write import config_document

CONSTANTS = default_constants().constants
FREE = Limits()


def _plan(name: str, cluster: str, batch: int, seq: int, limits: Limits = FREE) -> Plan:
    return search(Workload(named_model(name), seq, batch), parse_cluster(cluster), CONSTANTS, 0.08, limits)


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 12),
    heads=st.integers(1, 12),
    nodes=st.integers(1, 6),
    per_node=st.integers(1, 8),
    batch=st.integers(1, 96),
    seq=st.sampled_from([64, 100, 256]),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_every_layout_is_legal_or_the_request_is_refused(
    layers: int, heads: int, nodes: int, per_node: int, batch: int, seq: int, precision: str
) -> None:
    config = ModelConfig(n_layers=layers, hidden_size=8 * heads, n_heads=heads, vocab_size=100, max_positions=256)
    work = Workload(config, seq, batch, precision)  # type: ignore[arg-type]
    cluster = parse_cluster(f"{nodes}x{per_node}xA100")
    legal = [
        (t, p, cluster.devices // (t * p))
        for t, p in itertools.product(range(1, 2 * per_node + 1), range(1, layers + 1))
        if heads % t == 0 and cluster.devices % (t * p) == 0 and batch % (cluster.devices // (t * p)) == 0
    ]
    if not legal:
        with pytest.raises(ConfigError, match="no layout of"):
            search(work, cluster, CONSTANTS)
        return
    plan = search(work, cluster, CONSTANTS)
    every = [*plan.fitting, *plan.failing]
    assert {(c.layout.tensor, c.layout.pipeline, c.layout.data) for c in every} == set(legal)
    for candidate in every:
        layout = candidate.layout
        assert layout.devices == cluster.devices
        assert candidate.time.micro_batches * layout.micro_batch * layout.data == batch
        assert sum(layout.blocks_per_stage) == layers
        assert min(layout.blocks_per_stage) >= 1
        assert not layout.sequence_parallel or seq % layout.tensor == 0
        assert math.isfinite(candidate.seconds)
    assert [c.seconds for c in plan.fitting] == sorted(c.seconds for c in plan.fitting)
    model = find_model("gpt2")
    model = type(model)(
        "tested", config, {"family": "gpt2", **config.model_dump(exclude_none=True, exclude={"family"})}
    )
    if plan.fitting:
        document = config_document(model, plan, plan.fitting[0])
        run = resolve_run_config(document, cluster.devices)
        chosen = plan.fitting[0].layout
        assert (run.layout.tensor, run.layout.pipeline, run.layout.data) == (
            chosen.tensor,
            chosen.pipeline,
            chosen.data,
        )
        assert run.layout.global_batch == batch
        assert run.layout.blocks_per_stage == chosen.blocks_per_stage
        assert run.mdsp.train.recompute == chosen.recompute
        assert run.mdsp.parallel.sequence_parallel == chosen.sequence_parallel
        assert run.precision == precision


def test_16384_devices_offer_all_options() -> None:
    plan = _plan("llama3-405b", "2048x8xH100", 2048, 8192)
    every = [c.layout for c in (*plan.fitting, *plan.failing)]
    assert {layout.tensor for layout in every} == {1, 2, 4, 8, 16}
    assert {layout.sequence_parallel for layout in every} == {False, True}
    assert {layout.recompute for layout in every} == {"none", "full"}
    assert {layout.micro_batch for layout in every} >= {1, 2, 4}
    assert any(len(set(layout.blocks_per_stage)) > 1 for layout in every)


def test_what_fits_is_within_the_device() -> None:
    plan = _plan("gpt3-175b", "16x8xH100", 512, 2048)
    assert plan.fitting
    assert plan.failing
    assert all(c.memory.total <= USABLE * 80e9 for c in plan.fitting)
    assert all(c.memory.total > USABLE * 80e9 for c in plan.failing)


def test_step_parts_add_up_and_rates_follow_from_the_time() -> None:
    plan = _plan("gpt3-175b", "128x8xH100", 1536, 2048)
    best = plan.fitting[0]
    assert best.seconds == pytest.approx(sum(getattr(best.time, name) for name in (
        "matrices", "attention", "elementwise", "head", "accumulate", "tensor", "context", "pipeline", "imbalance",
        "bubble", "data", "optimizer", "scale")))  # fmt: skip
    assert plan.tokens_per_s(best) == pytest.approx(1536 * 2048 / best.seconds)
    flops = model_flops_per_token(named_model("gpt3-175b"), 2048) * 1536 * 2048
    assert plan.tflops_per_device(best) == pytest.approx(flops / best.seconds / 1024 / 1e12)
    assert plan.mfu(best) == pytest.approx(plan.tflops_per_device(best) / 989.4)
    assert plan.device_hours(best, 300e9) == pytest.approx(300e9 / plan.tokens_per_s(best) * 1024 / 3600)


def test_worked_example_of_the_bubble() -> None:
    """P = 16: 48.4 % with 16 micro-batches, 10.5 % with 128."""
    for batch, bubble in ((128, 0.484), (1024, 0.105)):
        plan = _plan("mt-nlg-530b", "128x8xA100", batch, 2048, Limits(8, 16, 1))
        assert plan.fitting[0].layout.data == 8
        assert round(plan.bubble(plan.fitting[0]), 3) == bubble


def test_expected_layouts_are_answered() -> None:
    found = {
        reason.what.split(" (")[0]: reason.why
        for reason in expected_layouts(_plan("gpt3-175b", "128x8xH100", 1536, 2048))
    }
    assert found["TP16"].startswith("leaves the node of 8; ")
    assert "slower" in found["no tensor parallelism"]
    assert "slower" in found["full recomputation"]
    single = expected_layouts(_plan("llama3-70b", "8x8xA100", 64, 4096))
    assert any("needs" in reason.why and "of 80 GB" in reason.why for reason in single)


def test_impossible_requests_say_what_would_fit() -> None:
    plan = _plan("llama3-405b", "2x8xH100", 64, 8192)
    assert not plan.fitting
    message = what_would_fit(plan)
    assert "stage 0 needs" in message
    nodes = int(message.split("it would fit with ")[1].split(" nodes")[0])
    assert _plan("llama3-405b", f"{nodes}x8xH100", 64, 8192).fitting


def test_nearest_better_layouts_are_faster() -> None:
    plan = _plan("llama3-8b", "1x8xH100", 64, 8192)
    worst = plan.fitting[-1]
    better = nearest_better(plan, worst.layout, worst.seconds)
    assert better
    assert all(c.seconds < worst.seconds for c in better)


def test_no_layout_beats_the_pareto_front() -> None:
    plan = _plan("llama3-8b", "1x8xH100", 64, 8192)
    front = pareto_front(plan.fitting)
    assert front[0] == plan.fitting[0]
    for other in plan.fitting:
        assert any(c.seconds <= other.seconds and c.memory.total <= other.memory.total for c in front)


def test_limits_restrict() -> None:
    plan = _plan("gpt3-6.7b", "4x8xA100", 256, 2048, Limits(4, 2, 2, "full"))
    assert {(c.layout.tensor, c.layout.pipeline, c.layout.micro_batch, c.layout.recompute) for c in plan.fitting} == {
        (4, 2, 2, "full")
    }
    assert len(MICRO_BATCHES) == len(set(MICRO_BATCHES))
