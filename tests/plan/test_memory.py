"""The memory model against published analytic tables, measured peaks, and counts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdsp.model.config import ModelConfig
from mdsp.plan.layout import MDSP, Layout, Software, Workload
from mdsp.plan.memory import ALLOCATOR_BYTES, block_activation_bytes, in_flight, peak_memory, rank_memory
from mdsp.plan.published import published_run

ROWS = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parent / "data/published_rows.jsonl").read_text().splitlines())
}
UNFUSED = Software("Megatron-LM", flash=False)
GPT = ModelConfig(
    n_layers=48, hidden_size=6144, n_heads=64, vocab_size=51200, max_positions=2048,
    hidden_dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1,
)  # fmt: skip
WORK = Workload(GPT, 2048, 4, "fp16")


@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        # Korthikanti et al. 2022, table 2, in units of s b h: 22B has a = 64, s = 2048, h = 6144, so 5 a s / h = 106.7.
        (Layout(1, micro_batch=4), 34 + 5 * 64 * 2048 / 6144),
        (Layout(8, micro_batch=4), 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        (Layout(8, micro_batch=4, sequence_parallel=True), 34 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        (Layout(8, micro_batch=4, sequence_parallel=True, recompute="selective"), 34 / 8),
        (Layout(8, micro_batch=4, recompute="full"), 2),
    ],
)
def test_activations_of_a_block_follow_korthikanti(layout: Layout, factor: float) -> None:
    found = block_activation_bytes(WORK, layout, UNFUSED) / (2048 * 4 * 6144)
    assert found == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["korthikanti22-fig1-mem-22B-none", "korthikanti22-fig1-mem-530B-selective+sp"])
def test_totals_equal_korthikantis_figure_1(name: str) -> None:
    """18 bytes per parameter and the activations, on the first stage; the paper leaves embeddings and buffers out."""
    run = published_run(ROWS[name])
    memory = rank_memory(run.workload, run.layout, run.software, 0, overhead=0.0)
    assert run.measured_gib is not None
    assert memory.total / 2**30 == pytest.approx(run.measured_gib, rel=0.08)


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith(("zb24", "torchtitan-t3"))])
def test_measured_allocator_peaks(name: str) -> None:
    run = published_run(ROWS[name])
    memory = peak_memory(run.workload, run.layout, run.software)[1]
    assert run.measured_gib is not None
    assert (memory.tensors + ALLOCATOR_BYTES) / 2**30 == pytest.approx(run.measured_gib, rel=0.10)


def test_states_are_2_4_and_12_bytes_and_zero_1_divides_the_last() -> None:
    layout = Layout(1, 1, 8, blocks_per_stage=(48,))
    memory = rank_memory(WORK, layout, UNFUSED, 0)
    assert memory.gradients == 2 * memory.weights
    assert memory.optimizer == 6 * memory.weights / 8
    assert rank_memory(WORK, Layout(1, 1, 8, zero=0), UNFUSED, 0).optimizer == 6 * memory.weights


def test_micro_batches_in_flight() -> None:
    """1F1B: P - stage, at most all (Narayanan et al. 2021); interleaved: 1 + (P - 1) / (P v) times stage 0."""
    assert [in_flight(Layout(1, 4), stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(1, 4), 0, 2) == 2
    assert in_flight(Layout(1, 8, virtual=3), 0, 64) == pytest.approx(8 * (1 + 7 / 24))
    assert in_flight(Layout(1, 4, schedule="gpipe"), 3, 16) == 16


def test_grouped_heads_gates_and_missing_dropout_shrink_activations() -> None:
    llama = ModelConfig(n_layers=2, hidden_size=512, n_heads=8, n_kv_heads=2, ffn_size=1024, vocab_size=1000,
                        norm="rmsnorm",
                        position="rotary", gated_mlp=True, activation="silu", tied_head=False)  # fmt: skip
    work, fused = Workload(llama, 128, 1), Software("fused")
    # norms' inputs and outputs 8 h; q, core output 4 h; k, v h; gate, up, product 6 ffn; log-sum-exp 4 per head
    expected = 128 * (8 * 512 + 4 * 512 + 4 * 128 + 6 * 1024 + 4 * 8)
    assert block_activation_bytes(work, Layout(), fused) == expected


def test_parts_add_up() -> None:
    memory = rank_memory(WORK, Layout(8, 4, 2, micro_batch=1), MDSP, 3)
    assert sum(memory.parts().values()) == pytest.approx(memory.total)
    assert memory.logits > 0
