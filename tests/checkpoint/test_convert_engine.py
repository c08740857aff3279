"""DeepSpeed's engine loads a converted checkpoint, and a checkpoint of training becomes a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mdsp.checkpoint.convert import from_hf, reshape, to_hf
from mdsp.checkpoint.weights import HfWeights
from mdsp.config.load import resolve_run_config
from tests.checkpoint.hf_models import hf_directory
from tests.checkpoint.jobs import Layout, train
from tests.harness import run_ranks


def _load(sharded: str, source: str) -> list[str]:
    """Names of this rank's parameters that differ from the source after `load_checkpoint`."""
    from mdsp.engine.build import build_engine

    document: dict[str, Any] = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "mdsp": {
            "model": {"from_hf": source},
            "parallel": {"tensor": 2, "pipeline": 2},
            "data": {"seq_length": 16},
        },
    }
    engine = build_engine(resolve_run_config(document, 4))  # from random weights
    weights = HfWeights(Path(source))
    rank = engine.grid.get_slice_parallel_rank()
    path, _ = engine.load_checkpoint(
        sharded, load_module_only=True, load_optimizer_states=False, load_lr_scheduler_states=False
    )
    assert path is not None
    wrong = []
    for parameter in engine.module.parameters():
        expected = torch.zeros_like(parameter)
        local = weights.local_tensor(parameter.entry, 2, rank)
        expected[tuple(slice(0, length) for length in local.shape)] = local
        if not torch.equal(parameter.detach(), expected):
            wrong.append(parameter.entry.name)
    return wrong


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_the_engine_loads_a_converted_checkpoint(case: str, tmp_path: Path) -> None:
    source = hf_directory(case)
    from_hf(source, tmp_path / "sharded", 2, 2)
    assert run_ranks(_load, 4, str(tmp_path / "sharded"), str(source)) == [[], [], [], []]


def test_a_checkpoint_of_training_is_exported_from_any_degree(tmp_path: Path) -> None:
    layout = Layout(tensor=2, pipeline=2)
    outcomes = run_ranks(train, 4, layout, str(tmp_path / "run"), 2, (2,))
    to_hf(tmp_path / "run", tmp_path / "hf")
    reshape(tmp_path / "run", tmp_path / "other", 4, 1)
    to_hf(tmp_path / "other", tmp_path / "again")
    weights = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "again" / "model.safetensors").read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    # Rank 0 and 1 are the two tensor ranks of the first stage; GPT-2 stores matrices transposed, query first.
    queries = [outcome.state["weight 2.attention.query.weight"] for outcome in outcomes[:2]]
    assert torch.equal(model.transformer.h[0].attn.c_attn.weight[:, :32].t(), torch.cat(queries))
