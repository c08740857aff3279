"""Interrupted and resumed equals uninterrupted, bit for bit, at the same layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.jobs import GLOBAL_BATCH, SEQ, Layout, Outcome, train
from tests.harness import run_ranks


def assert_identical(resumed: list[Outcome], straight: list[Outcome]) -> None:
    """The resumed run's losses are the last ones of the straight run's, and the ranks' states are the same bits."""
    for ours, reference in zip(resumed, straight, strict=True):
        assert ours.losses == reference.losses[-len(ours.losses) :]
        assert ours.counters == reference.counters
        assert ours.state.keys() == reference.state.keys()
        for name, value in reference.state.items():
            assert torch.equal(ours.state[name], value), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_is_the_uninterrupted_run(precision: str, tmp_path: Path) -> None:
    """TP2 x PP2 x DP2 with dropout: losses, weights, master weights, moments, step counts, cursor."""
    layout = Layout(2, 2, 2, precision, dropout=0.1)
    straight = run_ranks(train, 8, layout, str(tmp_path), 5, (3,))
    resumed = run_ranks(train, 8, layout, str(tmp_path), 5, (), "auto")
    assert len(resumed[0].losses) == 2
    assert_identical(resumed, straight)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    layout = Layout(tensor=2, pipeline=2, dropout=0.1)
    assert_identical(run_ranks(train, 4, layout, str(tmp_path), 3, (1, 2)), run_ranks(train, 4, layout, None, 3))


def test_saving_in_the_background_takes_the_state_of_its_step(tmp_path: Path) -> None:
    """Steps made while the files are being written do not reach them."""
    layout = Layout(pipeline=2, dropout=0.1)
    straight = run_ranks(train, 2, layout, str(tmp_path), 6, (3,), "none", True)
    resumed = run_ranks(train, 2, layout, str(tmp_path), 6, (), "auto")
    assert len(resumed[0].losses) == 3
    assert_identical(resumed, straight)


@pytest.mark.parametrize("layout", [Layout(tied=False), Layout(data=2, optimizer="SGD")], ids=["untied", "sgd"])
def test_other_models_and_optimizers(layout: Layout, tmp_path: Path) -> None:
    straight = run_ranks(train, layout.world_size, layout, str(tmp_path), 4, (2,))
    assert_identical(run_ranks(train, layout.world_size, layout, str(tmp_path), 4, (), "auto"), straight)


def test_manifest_and_names(tmp_path: Path) -> None:
    """What lies on the disk: DeepSpeed's names, `latest`, a manifest with the counters, and nothing else."""
    run_ranks(train, 2, Layout(tensor=2), str(tmp_path), 2, (2,))
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "global_step2"}
    assert (tmp_path / "latest").read_text() == "global_step2"
    names = {path.name for path in (tmp_path / "global_step2").iterdir()}
    layers = {f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer in range(7) for rank in range(2)}
    states = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(2)}
    optimizers = {f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(2)}
    assert names == layers | states | optimizers | {"mdsp.json"}
    manifest = json.loads((tmp_path / "global_step2" / "mdsp.json").read_text())
    assert manifest["counters"] == {"step": 2, "samples": 2 * GLOBAL_BATCH, "tokens": 2 * GLOBAL_BATCH * SEQ}
    assert manifest["training"]["wandb_run_id"] == "run-id"
    assert {file["file"]: file["size"] for file in manifest["files"]} == {
        name: (tmp_path / "global_step2" / name).stat().st_size for name in names - {"mdsp.json"}
    }
