"""A checkpoint of training at other degrees: `reshape` carries all of it, and training goes on from there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mdsp.checkpoint.convert import reshape, to_hf
from mdsp.cli import main
from mdsp.errors import CheckpointError
from tests.checkpoint.deepspeed_tools import assert_same_states, convert_by_deepspeed
from tests.checkpoint.hf_models import assert_same_bytes, tensors_of
from tests.checkpoint.jobs import Layout, run_config, state_of, train
from tests.harness import run_ranks

STEPS = 13
SAVE_AT = 3
TAG = f"global_step{SAVE_AT}"

TP_DP = Layout(tensor=2, data=2)
PP_DP = Layout(pipeline=2, data=2, scheduler=True)
GROUPED = Layout(tensor=4, tied=False, n_kv_heads=2)
MOMENTUM = Layout(tensor=2, optimizer="SGD")
BF16 = Layout(tensor=2, data=2, precision="bf16")


def _with(layout: Layout, **degrees: int) -> Layout:
    return dataclasses.replace(layout, **{"tensor": 1, "pipeline": 1, "data": 1, **degrees})


def _exported(run: Path, work: Path) -> dict[str, torch.Tensor]:
    to_hf(run, work)
    tensors = tensors_of(work)
    for name, tensor in tensors.items():
        if name.endswith("c_attn.bias"):  # softmax does not see the keys' third: Adam makes steps of rounding noise
            tensor.view(3, -1)[1] = 0
    return tensors


@pytest.mark.parametrize(
    ("source", "degrees", "targets"),
    [
        (TP_DP, (4, 2), [_with(TP_DP, tensor=4, pipeline=2), _with(TP_DP, data=4)]),
        (PP_DP, (2, 1), [_with(PP_DP, tensor=2, data=2), _with(PP_DP, pipeline=3)]),
        (GROUPED, (2, 2), [_with(GROUPED, tensor=2, pipeline=2)]),
        (MOMENTUM, (1, 2), [_with(MOMENTUM, pipeline=2, data=2)]),
    ],
    ids=["tp2dp2", "pp2dp2", "grouped", "sgd"],
)
def test_training_goes_on(source: Layout, degrees: tuple[int, int], targets: list[Layout], tmp_path: Path) -> None:
    """From the reshaped checkpoint and from one reshaped once more: losses and final weights of the undisturbed run."""
    run = tmp_path / "run"
    straight = run_ranks(train, source.world_size, source, str(run), STEPS, (SAVE_AT, STEPS))
    expected = torch.tensor(straight[0].losses[SAVE_AT:], dtype=torch.float64)
    weights = _exported(run, tmp_path / "straight")
    reshape(run / TAG, tmp_path / "once", *degrees)
    reshape(tmp_path / "once", tmp_path / "twice", 1, 4)
    shutil.rmtree(run)
    for number, (target, start) in enumerate(zip([*targets, targets[0]], ["once", "once", "twice"], strict=False)):
        out = tmp_path / f"resumed{number}"
        resumed = run_ranks(train, target.world_size, target, str(out), STEPS, (STEPS,), str(tmp_path / start))
        for rank in resumed:
            assert (rank.counters.step, rank.counters.samples) == (STEPS, straight[0].counters.samples)
            got = torch.tensor(rank.losses, dtype=torch.float64)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
        for name, value in _exported(out, tmp_path / f"hf{number}").items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6, msg=name)


def test_training_goes_on_in_bf16(tmp_path: Path) -> None:
    """At the layout of the run, bit for bit; at another one, within bf16's rounding."""
    straight = run_ranks(train, 4, BF16, str(tmp_path / "run"), STEPS, (SAVE_AT,))
    reshape(tmp_path / "run", tmp_path / "once", 1, 2)
    reshape(tmp_path / "once", tmp_path / "twice", 2, 1)
    same = run_ranks(train, 4, BF16, None, STEPS, (), str(tmp_path / "twice"))
    for before, after in zip(straight, same, strict=True):
        assert after.losses == before.losses[SAVE_AT:]
        assert after.state.keys() == before.state.keys()
        for name, value in before.state.items():
            assert torch.equal(after.state[name], value), name
    other = run_ranks(train, 4, _with(BF16, pipeline=2, data=2), None, STEPS, (), str(tmp_path / "once"))
    assert other[0].losses == pytest.approx(straight[0].losses[SAVE_AT:], rel=2**-8)


@pytest.mark.parametrize(
    "layout",
    [TP_DP, Layout(pipeline=2, data=2), GROUPED, BF16, Layout(2, 2, 2), Layout(data=4)],
    ids=["tp2dp2", "pp2dp2", "grouped", "bf16", "tp2pp2dp2", "dp4"],
)
def test_states_are_those_that_deepspeed_converts_to(layout: Layout, tmp_path: Path) -> None:
    """Every tensor bit for bit, also after a second reshape, and whatever the type of the weights."""
    run_ranks(train, layout.world_size, layout, str(tmp_path / "run"), SAVE_AT, (SAVE_AT,))
    convert_by_deepspeed(tmp_path / "run" / TAG, tmp_path / "theirs")
    reshape(tmp_path / "run", tmp_path / "once", 4, 1)
    assert_same_states(tmp_path / "once" / TAG, tmp_path / "theirs")
    reshape(tmp_path / "once", tmp_path / "twice", 1, 3, torch.bfloat16)
    assert_same_states(tmp_path / "twice" / TAG, tmp_path / "theirs")
    original, mine = (
        torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)
        for path in (tmp_path / "run" / TAG, tmp_path / "twice" / TAG)
    )
    for key in ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "ds_version"):
        assert mine[key] == original[key]


def _read_by_deepspeed(layout: Layout, directory: str) -> dict[str, torch.Tensor]:
    """The state after DeepSpeed itself has loaded a universal checkpoint; it finds the newest by itself."""
    from mdsp.engine.build import build_engine

    run = run_config(layout)
    run.deepspeed["checkpoint"] = {"load_universal": True}
    engine = build_engine(run)
    path, _ = engine.load_checkpoint(directory)
    assert path is not None and engine.global_steps == SAVE_AT
    return state_of(engine)


def test_deepspeed_loads_it(tmp_path: Path) -> None:
    """DeepSpeed's loader, at yet another layout, comes to the state that ours comes to without a reshape."""
    run_ranks(train, 4, TP_DP, str(tmp_path / "run"), SAVE_AT, (SAVE_AT,))
    reshape(tmp_path / "run", tmp_path / "out", 1, 2)
    target = Layout(tensor=4)
    ours = run_ranks(train, 4, target, str(tmp_path / "run"), SAVE_AT, (), "auto")
    theirs = run_ranks(_read_by_deepspeed, 4, target, str(tmp_path / "out"))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.state.keys() == reference.keys()
        for name, value in reference.items():
            assert torch.equal(mine.state[name], value), name


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(train, 4, TP_DP, str(folder), SAVE_AT, (SAVE_AT,))
    return folder


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def _reshape(*words: str | Path) -> int:
    return main(["convert", "reshape", *map(str, words), "--quiet"])


def test_the_commands_tell_what_is_there(pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert _reshape(pristine, out, "--tensor", "4", "--pipeline", "2") == 0
    assert "optimizer state: carried along" in capsys.readouterr().out
    assert main(["convert", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "universal form, for any layout: exp_avg, exp_avg_sq, fp32, step" in shown and "yes: manifest" in shown
    assert main(["checkpoint", "list", str(out)]) == 0
    assert "TP4 PP2 " in (listed := capsys.readouterr().out) and "complete, for any layout" in listed
    assert main(["checkpoint", "verify", str(out)]) == 0
    capsys.readouterr()
    assert main(["convert", "check", str(pristine), str(out)]) == 0
    assert "the same, 204 tensors" in capsys.readouterr().out  # 68 parameters: master weight and two moments each
    to_hf(pristine, tmp_path / "a")
    to_hf(out, tmp_path / "b")
    assert_same_bytes(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))
    state = next((out / TAG / "zero").glob("*/exp_avg_sq.pt"))
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(out)]) == 2
    assert "exp_avg_sq.pt is damaged" in capsys.readouterr().out
    state.unlink()
    assert main(["convert", "show", str(out)]) == 0
    assert "no: " in (shown := capsys.readouterr().out) and "exp_avg_sq.pt is missing" in shown


def test_weights_only(pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert _reshape(pristine, out, "--pipeline", "2", "--weights-only") == 0
    assert "optimizer state: left behind" in capsys.readouterr().out
    assert not (out / "global_step0" / "zero").exists() and not (out / "latest_universal").exists()
    assert main(["convert", "show", str(out)]) == 0
    assert "optimizer state   none" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(out)]) == 0
    assert _reshape(out, tmp_path / "again", "--tensor", "2") == 0
    assert "optimizer state" not in capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, out: Path) -> str:
    capsys.readouterr()
    assert _reshape(checkpoint, out) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert not out.exists() and not out.with_name(f"{out.name}.partial").exists()
    return captured.err


def test_optimizer_state_that_does_not_convert(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without ZeRO it lies in the engine's state: refused with the way out, not dropped."""
    run_ranks(train, 1, Layout(zero_stage=0), str(tmp_path / "run"), SAVE_AT, (SAVE_AT,))
    message = _refused(capfd, tmp_path / "run", tmp_path / "out")
    assert "zero_optimization.stage 0" in message and "--weights-only" in message
    assert _reshape(tmp_path / "run", tmp_path / "out", "--weights-only") == 0


def _rewrite(checkpoint: Path, name: str, change: Any) -> None:
    """Change what a file holds, and its hash, as a run that saved it so would have."""
    import xxhash

    folder = checkpoint / TAG
    state = torch.load(folder / name, weights_only=False)
    change(state)
    torch.save(state, folder / name)
    manifest = json.loads((folder / "mdsp.json").read_text())
    data = (folder / name).read_bytes()
    for entry in manifest["files"]:
        if entry["file"] == name:
            entry.update(size=len(data), hash=xxhash.xxh3_128(data).hexdigest())
    (folder / "mdsp.json").write_text(json.dumps(manifest))


SHARD = "zero_pp_rank_1_mp_rank_01_optim_states.pt"


def test_states_that_are_no_use(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def elastic(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["base_optimizer_state"] = [{}]

    def shorten(state: dict[str, Any]) -> None:
        for mapping in state["optimizer_state_dict"]["param_slice_mappings"]:
            mapping.pop("3.mlp.up.weight", None)

    def spoil(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][5] = float("nan")

    out = tmp_path / "out"
    _rewrite(checkpoint, SHARD, spoil)
    assert "tensor exp_avg of " in _refused(capsys, checkpoint, out)
    _rewrite(checkpoint, SHARD, shorten)
    assert "blocks.1.mlp.up.weight" in _refused(capsys, checkpoint, out)
    _rewrite(checkpoint, "zero_pp_rank_0_mp_rank_00_optim_states.pt", elastic)
    message = _refused(capsys, checkpoint, out)
    assert "rigid form" in message and "--weights-only" in message


def test_check_compares_optimizer_states(
    checkpoint: Path, pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def grow(state: dict[str, Any]) -> None:
        flat = state["optimizer_state_dict"]
        mapping = next(m for name, m in flat["param_slice_mappings"][0].items() if name.startswith("3."))
        flat["base_optimizer_state"]["state"][0]["exp_avg"][mapping.start] += 1

    _rewrite(checkpoint, "zero_pp_rank_0_mp_rank_00_optim_states.pt", grow)
    assert _reshape(checkpoint, tmp_path / "out", "--tensor", "4") == 0
    capsys.readouterr()
    for other in (checkpoint, tmp_path / "out"):
        assert main(["convert", "check", str(pristine), str(other)]) == 1
        printed = capsys.readouterr().out
        assert printed.count("differs: ") == 1 and "differs: optimizer state: exp_avg of blocks.1." in printed
    assert main(["convert", "check", str(checkpoint), str(tmp_path / "out")]) == 0
    to_hf(pristine, tmp_path / "hf")
    capsys.readouterr()
    assert main(["convert", "check", str(pristine), str(tmp_path / "hf")]) == 0
    assert f"optimizer state: only in {pristine}" in capsys.readouterr().out


def test_a_source_that_is_damaged(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (SHARD, "mp_rank_00_model_states.pt"):
        path = checkpoint / TAG / name
        before = path.read_bytes()
        data = bytearray(before)
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert name in _refused(capsys, checkpoint, tmp_path / "out")
        path.write_bytes(before)
    (checkpoint / TAG / SHARD).unlink()
    assert SHARD in _refused(capsys, checkpoint, tmp_path / "out")


def _resume_error(layout: Layout, start: str) -> str:
    try:
        train(layout, None, SAVE_AT, (), start)
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_engine_without_zero_cannot_resume_it(checkpoint: Path, tmp_path: Path) -> None:
    reshape(checkpoint, tmp_path / "out")
    (error,) = run_ranks(_resume_error, 1, Layout(zero_stage=0), str(tmp_path / "out"))
    assert error.endswith("set zero_optimization.stage to 1")
