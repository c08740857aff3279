"""Dropout masks: equal where activations are replicated, different everywhere else, the same when recomputed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mdsp.engine.build import build_engine
from mdsp.tensor_parallel.random import DropoutStreams
from tests.engine.ranks import Case, Chunks, Layout, RankRun, RecordingEngine, micro_batches, own_groups, train_case
from tests.engine.reference import global_batch
from tests.harness import run_ranks
from tests.model.hf_models import Tensors, gpt2

MODEL = gpt2("gpt2")
DROPOUT = dict(embedding_dropout=0.2, hidden_dropout=0.2, attention_dropout=0.2)
FIELDS = {**MODEL.fields, **DROPOUT}
STEPS = 2


@dataclass(frozen=True)
class Drawing:
    """One use of randomness: where in the model, when, and the mask (for the attention core: its generator's state)."""

    site: str
    step: int
    micro_batch: int
    mask: Tensor


class Watched(DropoutStreams):
    """Writes down every drawing."""

    def __init__(self, original: DropoutStreams) -> None:
        super().__init__(original.seed, original.data_rank, original.tensor_rank)
        self.drawings: list[Drawing] = []

    def dropout(self, x: Tensor, probability: float, training: bool, site: str, split: bool) -> Tensor:
        kept = super().dropout(torch.ones_like(x), probability, training, site, split).detach() != 0
        self.drawings.append(Drawing(site, self.moment.step, self.moment.micro_batch, kept))
        return super().dropout(x, probability, training, site, split)

    def prepare(self, site: str, split: bool) -> None:
        super().prepare(site, split)
        if site.endswith(".core"):
            state = torch.get_rng_state()
            self.drawings.append(Drawing(site, self.moment.step, self.moment.micro_batch, state))


def _initial() -> Tensors:
    parameters = dict(MODEL.build().named_parameters())
    return {name: tensor.detach() for name, tensor in MODEL.to_table(parameters).items()}


def _watch(case: Case, initial: Tensors) -> list[Drawing]:
    with own_groups():
        engine = build_engine(case.run_config(FIELDS), Chunks(initial, FIELDS), RecordingEngine)
        watched = engine.module.context.streams = Watched(engine.module.context.streams)
        _, data_rank, _ = case.layout.place(dist.get_rank())
        for step in range(STEPS):
            batch = global_batch(FIELDS["vocab_size"], step)
            engine.train_batch(micro_batches(batch, case.micro_batches, case.layout.data, data_rank))
        engine.destroy()
    return watched.drawings


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks(sequence_parallel: bool) -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    case = Case("gpt2", layout, sequence_parallel, micro_batches=5)
    ranks = run_ranks(_watch, layout.world_size, case, _initial())
    by_key: dict[tuple[str, int, int, int], dict[int, Tensor]] = {}
    for rank, drawings in enumerate(ranks):
        _, data, tensor = layout.place(rank)
        for drawing in drawings:
            key = (drawing.site, drawing.step, drawing.micro_batch, data)
            assert by_key.setdefault(key, {}).setdefault(tensor, drawing.mask) is drawing.mask, f"{key} twice"
    sites = {key[0] for key in by_key}
    branches = {f"blocks.{block}.{part}" for block in range(3) for part in ("attention", "mlp", "attention.core")}
    assert sites == {"embedding", *branches}
    assert len(by_key) == len(sites) * STEPS * case.micro_batches * layout.data
    unlike: list[tuple[object, Tensor]] = []
    for key, masks in by_key.items():
        assert masks.keys() == {0, 1}
        split = sequence_parallel or key[0].endswith(".core")
        assert torch.equal(masks[0], masks[1]) is not split, key
        unlike.append((key, masks[0]))
        if split:
            unlike.append(((key, 1), masks[1]))
    # Across data ranks, layers and sites, micro-batches and steps: no two alike.
    for (key, mask), (other, another) in itertools.combinations(unlike, 2):
        if mask.shape == another.shape and mask.dtype == another.dtype:
            assert not torch.equal(mask, another), (key, other)
    kept = torch.cat([mask.flatten() for _, mask in unlike if mask.dtype == torch.bool]).double()
    assert abs(float(kept.mean()) - 0.8) < 5 * (0.8 * 0.2 / kept.numel()) ** 0.5


def _train(cases: list[Case], initial: Tensors) -> list[RankRun]:
    return [train_case(case, FIELDS, initial) for case in cases]


def _watch_all(cases: list[Case], initial: Tensors) -> list[list[Drawing]]:
    return [_watch(case, initial) for case in cases]


RECOMPUTE = [("none", 1), ("selective", 1), ("full", 1), ("full", 2)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_draws_the_same_masks(sequence_parallel: bool) -> None:
    """What is recomputed draws again, and alike; gradients and weights are those without recomputation, to the bit."""
    layout = Layout(tensor=2, pipeline=2)
    cases = [Case("gpt2", layout, sequence_parallel, *mode, micro_batches=2, steps=STEPS) for mode in RECOMPUTE]
    initial = _initial()
    watched = run_ranks(_watch_all, layout.world_size, cases, initial)
    for rank in watched:
        once = {(d.site, d.step, d.micro_batch): d.mask for d in rank[0]}
        assert len(once) == len(rank[0])
        for (mode, _), drawings in zip(RECOMPUTE[1:], rank[1:], strict=True):
            times: dict[tuple[str, int, int], int] = {}
            for drawing in drawings:
                key = (drawing.site, drawing.step, drawing.micro_batch)
                assert torch.equal(drawing.mask, once[key]), (mode, key)
                times[key] = times.get(key, 0) + 1
            assert times.keys() == once.keys()
            for (site, *_), count in times.items():
                again = site.endswith(".core") if mode == "selective" else site.startswith("blocks.")
                assert count == (2 if again else 1), (mode, site)
    for rank_runs in run_ranks(_train, layout.world_size, cases, initial):
        plain = rank_runs[0]
        for run in rank_runs[1:]:
            assert run.losses == plain.losses
            for step in range(STEPS):
                assert all(torch.equal(run.grads[step][name], grad) for name, grad in plain.grads[step].items())
                assert all(torch.equal(run.weights[step][name], value) for name, value in plain.weights[step].items())


def test_masks_do_not_depend_on_stages_or_tensor_ranks() -> None:
    """Without attention dropout, whose heads are split, training with dropout is the same at any TP x PP."""
    fields = {**FIELDS, "attention_dropout": 0.0}
    initial = _initial()
    losses = []
    for layout in (Layout(), Layout(pipeline=2), Layout(tensor=2, pipeline=2)):
        case = Case("gpt2", layout, steps=3)
        runs = run_ranks(train_case, layout.world_size, case, fields, initial)
        losses.append(runs[0].losses)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-6)
    undisturbed = run_ranks(train_case, 1, Case("gpt2", Layout(), steps=3), MODEL.fields, initial)[0].losses
    assert abs(undisturbed[0] - losses[0][0]) > 1e-3  # dropout does something
