"""Every layout computes what one process of `transformers` computes: loss, gradients, global norm, weights."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.engine.compare import check_against
from tests.engine.ranks import Case, Layout, train_cases
from tests.engine.reference import OPTIMIZERS, Reference, reference_run
from tests.harness import run_ranks
from tests.model.hf_models import HfModel, bloom, gemma2, gpt2, gptj, llama, olmo2, qwen3

MODELS: Mapping[str, HfModel] = {
    model.name: model
    for model in (
        # 3 and 5 blocks, which no number of stages divides; vocabularies 257 and 509, which nothing divides
        gpt2("gpt2"),
        gpt2("gpt2 5 blocks", layers=5),
        gpt2("gpt2 untied", tied=False),
        gpt2("gpt2 6 heads", heads=6),
        llama("llama", kv_heads=2, biases=True),
        llama("llama 5 blocks", kv_heads=2, biases=True, layers=5),
        llama("llama tied MQA", kv_heads=1, tied=True, vocab=257),
        llama("llama 6 heads", kv_heads=2, heads=6),  # at TP3 the second rank reads parts of both key/value heads
        qwen3("qwen3"),
        qwen3("qwen3 MQA", kv_heads=1),
        olmo2("olmo2"),
        olmo2("olmo2 MQA", kv_heads=1),
        bloom("bloom"),
        gptj("gptj"),
        gemma2("gemma2"),
    )
}
FIELDS = {name: model.fields for name, model in MODELS.items()}

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(pipeline=2),
    Layout(pipeline=4),
    Layout(data=2),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, data=2),
    Layout(pipeline=2, data=2),
    Layout(tensor=2, pipeline=2, data=2),
    Layout(tensor=4, pipeline=2),
]
RECOMPUTE = [("none", 1), ("selective", 1), ("full", 1), ("full", 2)]


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Reference]:
    """By model and optimizer; filled as they are asked for."""
    return {}


def check(cases: list[Case], references: dict[tuple[str, str], Reference]) -> None:
    """Run the cases, which share a layout, in one job, and compare each."""
    for case in cases:
        if (case.model, case.optimizer) not in references:
            references[case.model, case.optimizer] = reference_run(MODELS[case.model], case.optimizer)
    initial = {case.model: references[case.model, case.optimizer].initial for case in cases}
    ranks = run_ranks(train_cases, cases[0].layout.world_size, cases, FIELDS, initial, seconds=280)
    failures = []
    for case, runs in zip(cases, zip(*ranks, strict=True), strict=True):
        try:
            check_against(references[case.model, case.optimizer], case, FIELDS[case.model], runs)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(cases)} cases\n" + "\n".join(failures)


def matrix(layout: Layout, sequence_parallel: bool) -> list[Case]:
    """Every recompute mode, over which models, optimizers and numbers of micro-batches are spread.

    Without recomputation both kinds of model run; with it they take turns, and over the layouts both meet every mode.
    """
    blocks = " 5 blocks" if layout.pipeline > 2 else ""
    turn = LAYOUTS.index(layout) + sequence_parallel
    cases = []
    for r, (recompute, interval) in enumerate([RECOMPUTE[0], *RECOMPUTE]):
        model = ("gpt2", "llama")[(turn + r) % 2] + blocks
        optimizer = list(OPTIMIZERS)[(turn // 2 + r // 2) % 2]
        # One micro-batch is quicker; recomputation of several matters where they are in flight together.
        many = r == 0 or (layout.pipeline > 1 and r in (2, 4))
        cases.append(Case(model, layout, sequence_parallel, recompute, interval, optimizer, 5 if many else 1))
    return cases


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout(layout: Layout, references: dict[tuple[str, str], Reference]) -> None:
    """Every recompute mode, gpt2-like and llama-like, 1 and 5 micro-batches, both optimizers."""
    check(matrix(layout, sequence_parallel=False), references)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.tensor > 1], ids=str)
def test_layout_with_sequence_parallelism(layout: Layout, references: dict[tuple[str, str], Reference]) -> None:
    check(matrix(layout, sequence_parallel=True), references)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2, pipeline=2), Layout(tensor=4), Layout(pipeline=2, data=2)], ids=str
)
def test_ties_and_replicated_heads(layout: Layout, references: dict[tuple[str, str], Reference]) -> None:
    """GPT-2 without tied head; Llama with tied head and one key/value head, fewer than tensor ranks."""
    cases = [
        Case(model, layout, sequence_parallel, steps=3)
        for model in ("gpt2 untied", "llama tied MQA")
        for sequence_parallel in {False, layout.tensor > 1}
    ]
    check(cases, references)


def test_tensor_degree_that_divides_neither_vocabulary_nor_heads(references: dict[tuple[str, str], Reference]) -> None:
    """TP3: 512 padded rows are padded further, and 2 key/value heads are read across ranks."""
    layout = Layout(tensor=3)
    cases = [
        Case(model, layout, sequence_parallel, steps=3)
        for model in ("gpt2 6 heads", "llama 6 heads")
        for sequence_parallel in (False, True)
    ]
    check(cases, references)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2), Layout(tensor=4)], ids=str)
def test_further_options(layout: Layout, references: dict[tuple[str, str], Reference]) -> None:
    """What else has tensor-parallel code of its own: query/key norms, ALiBi slopes, shared and sandwich norms, caps."""
    models = ("qwen3", "qwen3 MQA", "olmo2", "olmo2 MQA", "bloom", "gptj", "gemma2")
    cases = [
        Case(model, layout, sequence_parallel, micro_batches=2, steps=2)
        for model in models
        for sequence_parallel in sorted({False, layout.tensor > 1})
    ]
    check(cases, references)


def test_many_micro_batches(references: dict[tuple[str, str], Reference]) -> None:
    """One sample per micro-batch, more micro-batches than stages."""
    check(
        [Case(model, Layout(pipeline=4), micro_batches=10, steps=2) for model in ("gpt2 5 blocks", "llama 5 blocks")],
        references,
    )
