"""Predicted memory against what the tensors of a real run take: DeepSpeed's engine, every live tensor counted."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mdsp.config.load import RunConfig, resolve_run_config
from mdsp.engine.build import build_engine
from mdsp.plan.explain import layout_of, software_of, workload_of
from mdsp.plan.layout import model_sizes
from mdsp.plan.memory import rank_memory
from tests.engine.ranks import Layout, micro_batches, own_groups
from tests.engine.reference import Batch
from tests.harness import run_ranks

SEQ, VOCAB = 256, 512
GPT = {"family": "gpt2", "n_layers": 4, "hidden_size": 128, "n_heads": 4, "vocab_size": VOCAB, "max_positions": SEQ,
       "embedding_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
LLAMA = {"family": "llama", "n_layers": 4, "hidden_size": 128, "n_heads": 4, "n_kv_heads": 2, "ffn_size": 352,
         "vocab_size": VOCAB, "max_positions": SEQ, "tied_head": False}  # fmt: skip
BUCKET = 5e8
"""Storages from this size on are DeepSpeed's reduction buckets, whose size does not depend on the model."""


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.sizes or size >= BUCKET:
            return
        self.sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter):
                self.see(leaf)
        return found


@dataclass(frozen=True)
class Found:
    """One rank, in bytes."""

    measured: int
    predicted: float
    parameters: int
    predicted_parameters: int


def _run(fields: dict[str, Any], layout: Layout, parallel: bool, recompute: str, precision: str) -> RunConfig:
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "mdsp": {
            "model": fields,
            "parallel": {"tensor": layout.tensor, "pipeline": layout.pipeline, "sequence_parallel": parallel},
            "data": {"seq_length": SEQ},
            "train": {"recompute": recompute},
        },
    }
    if precision != "fp32":
        document[precision] = {"enabled": True}
    return resolve_run_config(document, layout.world_size)


def _tensors() -> list[torch.Tensor]:
    """All tensors of this process."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and o.device.type == "cpu"]


def _measure(runs: list[RunConfig], layout: Layout) -> list[Found]:
    found = []
    for run in runs:
        with own_groups():
            others = {id(tensor): tensor for tensor in _tensors()}  # held, so that no other can take their identity
            engine = build_engine(run)
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(0, VOCAB, (run.layout.global_batch, SEQ + 1), generator=generator)
            batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), SEQ))
            data_rank = layout.place(dist.get_rank())[1]
            # The second step counts: the first also makes the optimizer's state.
            engine.train_batch(micro_batches(batch, 4, layout.data, data_rank))
            live = LiveTensors()
            for tensor in _tensors():
                if id(tensor) not in others:
                    live.see(tensor)
            with live:
                engine.train_batch(micro_batches(batch, 4, layout.data, data_rank))
            memory = rank_memory(workload_of(run), layout_of(run), software_of(run), engine.stage_id)
            found.append(
                Found(
                    live.peak,
                    memory.tensors - memory.buffers,
                    sum(p.numel() for p in engine.module.parameters()),
                    model_sizes(run.model, run.layout.tensor).stage(engine.stage_id, run.layout.blocks_per_stage),
                )
            )
            engine.destroy()
    return found


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(2, 2, 2), [(False, "none", "fp32"), (True, "none", "fp32")]),
        (Layout(1, 2, 1), [(False, "full", "fp32"), (False, "none", "bf16")]),
    ],
    ids=str,
)
def test_predicted_memory_is_within_10_percent_of_the_tensors(
    layout: Layout, options: list[tuple[bool, str, str]]
) -> None:
    """Weights, gradients, optimizer state, activations in flight, logits: on the first and the last stage."""
    runs = [_run(fields, layout, *option) for fields in (GPT, LLAMA) for option in options]
    ranks = run_ranks(_measure, layout.world_size, runs, layout)
    for rank in (ranks[0], ranks[-1]):
        for run, one in zip(runs, rank, strict=True):
            assert one.parameters == one.predicted_parameters
            assert one.predicted == pytest.approx(one.measured, rel=0.10), run.model.family
