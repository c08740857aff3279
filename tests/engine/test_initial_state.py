"""Where training starts is the same at every layout, to the bit: weights, and the samples of every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mdsp.data.loader import GlobalBatches
from mdsp.data.order import SampleOrder
from mdsp.data.tokens import TokenCorpus
from mdsp.engine.batches import StageBatches
from mdsp.engine.build import build_engine
from mdsp.model.config import ModelConfig
from mdsp.model.layers import SingleProcessGPT
from mdsp.tensor_parallel.parameters import RandomWeights
from tests.data.raw import write_raw
from tests.engine.compare import gather
from tests.engine.ranks import Case, Layout, local_weights, own_groups
from tests.harness import run_ranks
from tests.model.hf_models import Tensors, gpt2, llama

MODELS = {model.name: model.fields for model in (gpt2("gpt2", layers=5), llama("llama", kv_heads=2, layers=5))}
LAYOUTS = [
    Layout(),
    Layout(tensor=2, pipeline=2, data=2),
    Layout(tensor=4, pipeline=2),
    Layout(pipeline=4, data=2),
]
SEED = 1234


def _initial(layout: Layout) -> dict[str, Tensors]:
    found = {}
    for name, fields in MODELS.items():
        with own_groups():
            engine = build_engine(Case(name, layout, sequence_parallel=layout.tensor > 1).run_config(fields))
            found[name] = local_weights(engine)
            engine.destroy()
    return found


def test_weights() -> None:
    """Drawn from (seed, name): what a single process without DeepSpeed gets, at every layout, padding zero."""
    for layout in LAYOUTS:
        ranks = run_ranks(_initial, layout.world_size, layout)
        for name, fields in MODELS.items():
            alone = SingleProcessGPT(ModelConfig(**fields), RandomWeights(SEED)).parameters_by_entry()
            found = gather(layout, fields, [rank[name] for rank in ranks], "weight")
            assert found.keys() == alone.keys()
            for key, value in found.items():
                assert torch.equal(value, alone[key].detach()[: len(value)]), f"{layout}: {key}"


SEQ, STEPS, GLOBAL_BATCH, END = 6, 4, 12, 0


def _batches(layout: Layout, micro_batch: int, prefix: str) -> list[list[tuple[Tensor, tuple[Tensor, Tensor]]]]:
    """What the engine would pull on this rank, per step."""
    _, data_rank, _ = layout.place(dist.get_rank())
    mine = None
    for index in range(layout.world_size // (layout.tensor * layout.data)):
        for tensor in range(layout.tensor):
            first = index * layout.data * layout.tensor + tensor
            members = list(range(first, first + layout.data * layout.tensor, layout.tensor))
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
    assert mine is not None
    corpus = TokenCorpus.open(prefix)
    order = SampleOrder(corpus.document_lengths, SEQ, seed=5)
    batches = GlobalBatches(
        corpus, order, GLOBAL_BATCH, micro_batch, data_rank, layout.data, eod_id=END, mask_separators=True
    )
    stage = StageBatches(batches, mine, torch.device("cpu"))
    return [list(stage.train(step * GLOBAL_BATCH)) for step in range(STEPS)]


def test_samples_and_loss_weights(tmp_path: Path) -> None:
    """The same global batch in the same order; only who computes which differs. Weights sum to micro-batches x data."""
    generator = np.random.default_rng(0)
    documents = [[*generator.integers(1, 90, size=generator.integers(1, 12)).tolist(), END] for _ in range(60)]
    prefix = write_raw(tmp_path / "corpus", documents)
    truth: list[tuple[Tensor, Tensor, Tensor]] = []
    for layout, micro_batch in (
        (Layout(), 12),
        (Layout(), 3),
        (Layout(data=2), 3),
        (Layout(2, 2, 2), 2),
        (Layout(2, 1, 4), 1),
    ):
        ranks = run_ranks(_batches, layout.world_size, layout, micro_batch, prefix)
        count = GLOBAL_BATCH // (micro_batch * layout.data)
        by_data = {layout.place(rank)[1]: batches for rank, batches in enumerate(ranks)}
        for rank, batches in enumerate(ranks):  # all tensor ranks and stages of a data rank read the same
            for step in range(STEPS):
                pairs = zip(batches[step], by_data[layout.place(rank)[1]][step], strict=True)
                assert all(torch.equal(a[0], b[0]) and torch.equal(a[1][1], b[1][1]) for a, b in pairs)
        for step in range(STEPS):
            picked = [by_data[d][step][m] for m in range(count) for d in range(layout.data)]
            tokens, labels, weights = (
                torch.cat([part(batch) for batch in picked])
                for part in (lambda b: b[0], lambda b: b[1][0], lambda b: b[1][1])
            )
            assert torch.equal(tokens[:, 1:], labels[:, :-1])
            assert torch.equal(weights > 0, tokens != END)  # what follows a separator is not predictable
            # Mean over micro-batches and data ranks of sum(loss x weight) = sum(loss x mask) / sum(mask).
            expected = (tokens != END).float() * (count * layout.data) / (tokens != END).sum()
            torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0.0)
            if len(truth) <= step:
                truth.append((tokens, labels, weights > 0))
            assert all(torch.equal(a, b) for a, b in zip(truth[step], (tokens, labels, weights > 0), strict=True))
