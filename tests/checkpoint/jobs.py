"""What the tests of training checkpoints run on the ranks: a tiny model on random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdsp.checkpoint.training import (
    Counters,
    PendingSave,
    find_checkpoint,
    load_training_checkpoint,
    save_training_checkpoint,
)
from mdsp.config.load import RunConfig, resolve_run_config

VOCAB, SEQ, GLOBAL_BATCH, MICRO_BATCH = 257, 16, 8, 2


@dataclass(frozen=True)
class Layout:
    """Degrees of a job."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    precision: str = "fp32"
    dropout: float = 0.0
    tied: bool = True
    optimizer: str = "AdamW"
    n_kv_heads: int = 4
    scheduler: bool = False
    zero_stage: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


def run_config(layout: Layout, checkpoint: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """A run of the tiny model."""
    params: dict[str, Any] = (
        {"lr": 1e-3, "weight_decay": 0.1} if layout.optimizer == "AdamW" else {"lr": 0.01, "momentum": 0.9}
    )
    document: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": layout.optimizer, "params": params},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": layout.zero_stage},
        "mdsp": {
            "model": {
                "family": "gpt2" if layout.n_kv_heads == 4 else "llama",
                "n_layers": 4,
                "hidden_size": 32,
                "n_heads": 4,
                "n_kv_heads": layout.n_kv_heads,
                "vocab_size": VOCAB,
                "max_positions": 32,
                "tied_head": layout.tied,
                "hidden_dropout": layout.dropout,
                "attention_dropout": layout.dropout,
                "embedding_dropout": layout.dropout,
            },
            "parallel": {"tensor": layout.tensor, "pipeline": layout.pipeline},
            "data": {"seq_length": SEQ},
            "train": train,
            "checkpoint": checkpoint or {},
        },
    }
    if layout.scheduler:
        document["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}}
    if layout.precision != "fp32":
        document[layout.precision] = {"enabled": True}
    return resolve_run_config(document, layout.world_size)


def micro_batches(engine: Any, samples: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """This data rank's part of the global batch that begins at a cursor; sample i is a function of i."""
    rank, ranks = engine.grid.get_data_parallel_id(), engine.grid.get_data_parallel_world_size()
    for first in range(samples + rank * MICRO_BATCH, samples + GLOBAL_BATCH, ranks * MICRO_BATCH):
        rows = [
            torch.randint(0, VOCAB, (1, SEQ + 1), generator=torch.Generator().manual_seed(index))
            for index in range(first, first + MICRO_BATCH)
        ]
        tokens = torch.cat(rows)
        weights = torch.full((MICRO_BATCH, SEQ), 1 / (MICRO_BATCH * SEQ))
        yield tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), weights)


def state_of(engine: Any) -> dict[str, Tensor]:
    """Everything that decides how training goes on: weights, master weights, optimizer state of this rank."""
    found = {f"weight {name}": value.detach().clone() for name, value in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 0:
        return found  # the optimizer works on the weights themselves
    inner = engine.optimizer.optimizer
    for index, group in enumerate(inner.param_groups):
        (flat,) = group["params"]
        found[f"master {index}"] = flat.detach().clone()
        for key, value in inner.state[flat].items():
            found[f"{key} {index}"] = torch.as_tensor(value).clone()
    return found


@dataclass(frozen=True)
class Outcome:
    """What a rank saw."""

    losses: list[float]
    state: dict[str, Tensor]
    counters: Counters
    notes: tuple[str, ...] = ()
    error: str | None = None


def train(
    layout: Layout,
    directory: str | None,
    steps: int,
    save_at: tuple[int, ...] = (),
    resume: str = "none",
    background: bool = False,
) -> Outcome:
    """Train up to step `steps`; save after the given steps; start where `resume` says."""
    from mdsp.engine.build import build_engine

    run = run_config(layout)
    folder = Path(directory) if directory else None
    engine = build_engine(run)
    found = find_checkpoint(folder, resume)
    counters = Counters() if found is None else load_training_checkpoint(engine, run, found)
    losses: list[float] = []
    pending: PendingSave | None = None
    while counters.step < steps:
        loss = engine.train_batch(micro_batches(engine, counters.samples))
        losses.append(float(loss))
        counters = Counters(
            step=counters.step + 1,
            samples=counters.samples + GLOBAL_BATCH,
            tokens=counters.tokens + GLOBAL_BATCH * SEQ,
            best_eval_loss=losses[-1],
            wandb_run_id="run-id",
        )
        if counters.step in save_at:
            assert folder is not None
            if background:
                pending = PendingSave(engine, run, folder, counters, background=True)
            else:
                save_training_checkpoint(engine, run, folder, counters)
    if pending is not None:
        pending.finish()
    return Outcome(losses, state_of(engine), counters, found.passed_over if found else ())
