"""What one training step communicates between tensor ranks, counted by the engine's own group."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mdsp.engine.build import build_engine
from tests.engine.ranks import Case, Layout, micro_batches, own_groups
from tests.engine.reference import GLOBAL_BATCH, global_batch
from tests.harness import run_ranks
from tests.model.hf_models import SEQ, gpt2

MICRO_BATCHES = 2
RESIDUAL = SEQ * (GLOBAL_BATCH // MICRO_BATCHES) * 32
TOKENS = SEQ * (GLOBAL_BATCH // MICRO_BATCHES)


def _counts(case: Case, layers: list[int]) -> list[tuple[dict[str, int], dict[str, int]]]:
    found = []
    for count in layers:
        fields = gpt2("gpt2", layers=count).fields
        with own_groups():
            engine = build_engine(case.run_config(fields))
            _, data_rank, _ = case.layout.place(dist.get_rank())
            traffic = engine.module.context.group.traffic
            traffic.clear()
            batch = global_batch(fields["vocab_size"], 0)
            engine.train_batch(micro_batches(batch, case.micro_batches, case.layout.data, data_rank))
            found.append((dict(traffic.calls), dict(traffic.elements)))
            engine.destroy()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_per_block_and_for_the_vocabulary(sequence_parallel: bool) -> None:
    """Per micro-batch: 2 + 2 for each block; embedding, head and the two numbers per token of the cross entropy."""
    case = Case("gpt2", Layout(tensor=2), sequence_parallel, micro_batches=MICRO_BATCHES, steps=1)
    for rank in run_ranks(_counts, 2, case, [1, 3]):
        for layers, (calls, elements) in zip((1, 3), rank, strict=True):
            loss = 3 * TOKENS  # a maximum; a sum of exponentials and the label's logit
            if sequence_parallel:
                # Blocks: forward 2 gathers and 2 scatters, backward 4 and 2. The embedding scatters and gathers its
                # gradient; the head gathers, gathers again backward, and scatters the gradient of its input.
                gathers, scatters = 6 * layers + 3, 4 * layers + 2
                wanted = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": 2}
                sizes = {"all_gather": gathers * RESIDUAL, "reduce_scatter": scatters * RESIDUAL, "all_reduce": loss}
            else:
                wanted = {"all_reduce": 4 * layers + 2 + 2}
                sizes = {"all_reduce": (4 * layers + 2) * RESIDUAL + loss}
            assert calls == {kind: count * MICRO_BATCHES for kind, count in wanted.items()}
            assert elements == {kind: count * MICRO_BATCHES for kind, count in sizes.items()}
