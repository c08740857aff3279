"""Resumed at any other layout or precision, a run goes on as it would have; DeepSpeed's own tools agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mdsp.checkpoint.manifest import parse_manifest
from mdsp.checkpoint.universal_writer import convert_to_universal
from tests.checkpoint.deepspeed_tools import assert_same_states, convert_by_deepspeed
from tests.checkpoint.jobs import Layout, Outcome, run_config, state_of, train
from tests.harness import run_ranks

STEPS = 13
SAVE_AT = 3

ONE = Layout()
PAIRS: list[tuple[Layout, list[Layout]]] = [
    (Layout(tensor=4), [ONE, Layout(tensor=2, pipeline=2)]),
    (Layout(pipeline=4), [ONE, Layout(tensor=2, data=2)]),
    (Layout(data=2), [Layout(data=4), Layout(pipeline=2)]),
    (Layout(2, 2, 2), [ONE, Layout(tensor=4, pipeline=2), Layout(pipeline=3)]),
    (ONE, [Layout(2, 2, 2)]),
    (Layout(tensor=2, tied=False, n_kv_heads=2), [Layout(tensor=4, tied=False, n_kv_heads=2)]),
    (Layout(data=2, optimizer="SGD"), [Layout(tensor=2, optimizer="SGD")]),
]


def _name(layout: Layout) -> str:
    extra = ("" if layout.tied else "-untied") + ("" if layout.optimizer == "AdamW" else "-sgd")
    return f"tp{layout.tensor}pp{layout.pipeline}dp{layout.data}{extra}"


@pytest.mark.parametrize(
    ("source", "targets"), PAIRS, ids=lambda value: _name(value) if isinstance(value, Layout) else ""
)
def test_resumed_elsewhere_goes_on_the_same(source: Layout, targets: list[Layout], tmp_path: Path) -> None:
    """Ten further fp32 steps, AdamW's moments included, with a vocabulary (257) that no degree divides."""
    straight: list[Outcome] = run_ranks(train, source.world_size, source, str(tmp_path), STEPS, (SAVE_AT,))
    expected = torch.tensor(straight[0].losses[SAVE_AT:], dtype=torch.float64)
    for target in targets:
        resumed = run_ranks(train, target.world_size, target, str(tmp_path), STEPS, (), "auto")
        for rank in resumed:
            assert (rank.counters.step, rank.counters.samples) == (STEPS, straight[0].counters.samples)
            got = torch.tensor(rank.losses, dtype=torch.float64)
            assert len(got) == STEPS - SAVE_AT
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("source", "target"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_the_other_precision(source: str, target: str, tmp_path: Path) -> None:
    """Master weights and moments are fp32 in both: they arrive bit for bit, and the loss within bf16's rounding."""
    straight = run_ranks(train, 2, Layout(data=2, precision=source), str(tmp_path), 4, (2,))
    at_save = run_ranks(train, 2, Layout(data=2, precision=source), str(tmp_path), 2, (), "auto")
    loaded = run_ranks(train, 2, Layout(data=2, precision=target), str(tmp_path), 2, (), "auto")
    for before, after in zip(at_save, loaded, strict=True):
        for name, value in before.state.items():
            if not name.startswith("weight"):
                count = min(value.numel(), after.state[name].numel())  # the two pad their flat buffers differently
                assert torch.equal(value.flatten()[:count], after.state[name].flatten()[:count]), name
    resumed = run_ranks(train, 2, Layout(data=2, precision=target), str(tmp_path), 4, (), "auto")
    assert resumed[0].losses == pytest.approx(straight[0].losses[2:], rel=2**-8)


def _read_by_deepspeed(layout: Layout, directory: str) -> dict[str, torch.Tensor]:
    """The state after DeepSpeed itself has loaded our universal checkpoint."""
    from mdsp.engine.build import build_engine

    run = run_config(layout)
    run.deepspeed["checkpoint"] = {"load_universal": True}
    engine = build_engine(run)
    engine.load_checkpoint(directory, tag="global_step3_universal")
    return state_of(engine)


def test_deepspeed_reads_our_universal_form(tmp_path: Path) -> None:
    """DeepSpeed's loader, at another layout, comes to the same state as ours."""
    run_ranks(train, 4, Layout(tensor=2, data=2), str(tmp_path), SAVE_AT, (SAVE_AT,))
    target = Layout(tensor=4)
    ours = run_ranks(train, 4, target, str(tmp_path), SAVE_AT, (), "auto")
    theirs = run_ranks(_read_by_deepspeed, 4, target, str(tmp_path))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.state.keys() == reference.keys()
        for name, value in reference.items():
            assert torch.equal(mine.state[name], value), name


@pytest.mark.parametrize("layout", [Layout(2, 2, 1), Layout(tensor=4, tied=False, n_kv_heads=2)], ids=_name)
def test_deepspeed_converts_our_checkpoints(layout: Layout, tmp_path: Path) -> None:
    """Its converter, told by the checkpoint how parameters are split, makes the tensors that ours makes."""
    run_ranks(train, layout.world_size, layout, str(tmp_path), 2, (2,))
    checkpoint = tmp_path / "global_step2"
    ours = convert_to_universal(checkpoint, parse_manifest((checkpoint / "mdsp.json").read_bytes(), "the manifest"))
    convert_by_deepspeed(checkpoint, tmp_path / "by_deepspeed")
    assert_same_states(ours, tmp_path / "by_deepspeed")
