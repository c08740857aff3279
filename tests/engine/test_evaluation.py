"""Evaluation through the engine: the loss that `transformers` computes, and no trace of it in training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mdsp.engine.build import build_engine
from tests.engine.ranks import Case, Chunks, Layout, local_weights, micro_batches, own_groups
from tests.engine.reference import global_batch, masked_loss
from tests.harness import run_ranks
from tests.model.hf_models import Tensors, gpt2, hf_logits, llama

MODELS = {model.name: model for model in (gpt2("gpt2"), llama("llama", kv_heads=2, biases=True))}
DROPOUT = dict(embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)


def _evaluate(case: Case, initial: Tensors) -> list[float]:
    """Losses of two batches."""
    fields = {**MODELS[case.model].fields, **DROPOUT}
    with own_groups():
        engine = build_engine(case.run_config(fields), Chunks(initial, fields))
        data = case.layout.data
        _, data_rank, _ = case.layout.place(dist.get_rank())
        losses = []
        for step in range(2):
            batch = micro_batches(global_batch(fields["vocab_size"], step), case.micro_batches, data, data_rank)
            losses.append(float(engine.eval_batch(batch)))
        engine.destroy()
    return losses


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2, pipeline=2), Layout(pipeline=2, data=2), Layout(tensor=4)], ids=str
)
def test_loss(layout: Layout) -> None:
    """With dropout in the model, which evaluation leaves out."""
    for name, model in MODELS.items():
        hf = model.build()
        initial = {key: value.detach() for key, value in model.to_table(dict(hf.named_parameters())).items()}
        case = Case(name, layout, sequence_parallel=layout.tensor == 4)
        ranks = run_ranks(_evaluate, layout.world_size, case, initial)
        for step in range(2):
            batch = global_batch(model.fields["vocab_size"], step)
            with torch.no_grad():
                wanted = float(masked_loss(hf_logits(hf, batch.tokens), batch))
            for losses in ranks:
                assert losses[step] == pytest.approx(wanted, rel=1e-6), f"{case}, batch {step}"


def _train(case: Case, evaluations: bool) -> tuple[list[float], Tensors]:
    fields = {**MODELS[case.model].fields, **DROPOUT}
    with own_groups():
        engine = build_engine(case.run_config(fields))
        data, vocab = case.layout.data, fields["vocab_size"]
        _, data_rank, _ = case.layout.place(dist.get_rank())
        losses = []
        for step in range(3):
            loss = engine.train_batch(micro_batches(global_batch(vocab, step), case.micro_batches, data, data_rank))
            losses.append(float(loss))
            for held_out in range(2 if evaluations else 0):
                engine.eval_batch(
                    micro_batches(global_batch(vocab, 50 + held_out), case.micro_batches, data, data_rank)
                )
        weights = local_weights(engine)
        engine.destroy()
    return losses, weights


@pytest.mark.parametrize("layout", [Layout(tensor=2, pipeline=2), Layout(pipeline=2, data=2)], ids=str)
def test_training_does_not_notice(layout: Layout) -> None:
    """Losses and weights with evaluations in between are those without, to the bit, dropout included."""
    case = Case("gpt2", layout, sequence_parallel=layout.tensor > 1, recompute="full")
    plain = run_ranks(_train, layout.world_size, case, False)
    interrupted = run_ranks(_train, layout.world_size, case, True)
    for (losses, weights), (others, other_weights) in zip(plain, interrupted, strict=True):
        assert losses == others
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
