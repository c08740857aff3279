"""ZeRO-1: the optimizer's state per rank falls as 1 / data-parallel degree; groups are the same on every stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mdsp.engine.build import build_engine
from mdsp.engine.optimizer import build_optimizer
from mdsp.errors import ConfigError
from tests.engine.ranks import Case, Layout, micro_batches, own_groups
from tests.engine.reference import global_batch
from tests.harness import run_ranks
from tests.model.hf_models import gpt2

FIELDS = gpt2("gpt2").fields


def _state_bytes(cases: list[Case]) -> list[tuple[int, int, list[float]]]:
    """Per case: bytes of Adam's moments after a step, parameters of this rank, weight decay of each group."""
    found = []
    for case in cases:
        with own_groups():
            engine = build_engine(case.run_config(FIELDS))
            _, data_rank, _ = case.layout.place(dist.get_rank())
            batch = global_batch(FIELDS["vocab_size"], 0)
            engine.train_batch(micro_batches(batch, case.micro_batches, case.layout.data, data_rank))
            moments = [
                tensor
                for state in engine.optimizer.optimizer.state.values()
                for tensor in state.values()
                if torch.is_tensor(tensor) and tensor.ndim
            ]
            size = sum(tensor.numel() * tensor.element_size() for tensor in moments)
            count = sum(p.numel() for p in engine.module.parameters())
            found.append((size, count, [group["weight_decay"] for group in engine.optimizer.param_groups]))
            engine.destroy()
    return found


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_state_is_divided_by_the_data_ranks(settings: dict[str, object]) -> None:
    """Adam holds two fp32 numbers per parameter: 8 bytes x parameters / data ranks, but for DeepSpeed's alignment."""
    for data in (1, 2, 5):
        case = Case("gpt2", Layout(data=data), optimizer="AdamW", micro_batches=1, settings=settings)
        ranks = run_ranks(_state_bytes, data, [case])
        for size, count, _ in (rank[0] for rank in ranks):
            # Each of the two groups is rounded up to a few elements per data rank.
            assert 8 * count / data - 8 * 64 <= size <= 8 * count / data + 8 * 64, (data, size, count)
        assert sum(rank[0][0] for rank in ranks) >= 8 * ranks[0][0][1]


def test_every_stage_has_the_same_groups() -> None:
    """Stages with fewer groups would wait for the others' norm for ever."""
    case = Case("gpt2", Layout(pipeline=3), optimizer="AdamW", micro_batches=1)
    ranks = run_ranks(_state_bytes, 3, [case])
    assert [rank[0][2] for rank in ranks] == [[0.05, 0.0]] * len(ranks)


def test_unknown_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="Lion"):
        build_optimizer({"type": "Lion"}, [])
