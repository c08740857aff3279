"""What must not be converted is refused: one message that names it, exit 2, no output that looks complete."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mdsp.checkpoint.convert import from_hf
from mdsp.cli import main
from tests.checkpoint.hf_models import copy_with, hf_directory, tensors_of

NAME = "model.layers.1.mlp.up_proj.weight"


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """Run `mdsp convert`; it must exit with 2 and one message, which is returned."""
    capsys.readouterr()
    assert main(["convert", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mdsp: error: ") and captured.err.count("\n") == 1
    return captured.err


def _changed(work: Path, change: Callable[[dict[str, torch.Tensor]], None], **fields: object) -> Path:
    tensors = tensors_of(hf_directory("llama"))
    change(tensors)
    return copy_with(hf_directory("llama"), work / "hf", tensors, **fields)


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME][3, 4] = float("nan")


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NAME]


def _extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(48)


def _shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME] = tensors[NAME][:40].clone()


def _twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME.removeprefix("model.")] = tensors[NAME].clone()


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME] = tensors[NAME].to(torch.int8)


@pytest.mark.parametrize("change", [_nan, _missing, _extra, _shape, _twice, _integers])
def test_tensors(
    change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _changed(tmp_path, change)
    message = refused(capsys, "from-hf", source, tmp_path / "out", "--tensor", "2")
    named = "mlp.up_proj.bias" if change is _extra else NAME.removeprefix("model.")
    assert named in message
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_head_that_is_missing_or_not_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def behead(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    source = _changed(tmp_path, behead)
    message = refused(capsys, "from-hf", source, tmp_path / "out")
    assert "lm_head.weight" in message and "tie_word_embeddings" in message
    tied = copy_with(source, tmp_path / "tied", tensors_of(hf_directory("llama")), tie_word_embeddings=True)
    assert "lm_head.weight differs" in refused(capsys, "from-hf", tied, tmp_path / "out")


@pytest.mark.parametrize(
    ("case", "fields", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "contradicts"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act"),
        ("llama", {"attention_chunk_size": 128}, "attention_chunk_size"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"num_attention_heads": 3}, "n_heads"),
        ("llama", {"model_type": "mamba"}, "mamba"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_ctx": 64, "hidden_size": 48}, "contradicts"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "layer_types"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_fields(
    case: str, fields: dict[str, object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copy_with(hf_directory(case), tmp_path / "hf", tensors_of(hf_directory(case)), **fields)
    assert named in refused(capsys, "from-hf", source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("degrees", "named"),
    [
        (("--tensor", "3"), "n_heads 4"),
        (("--tensor", "8"), "n_heads 4"),
        (("--pipeline", "4"), "3 blocks"),
    ],
)
def test_degrees(degrees: tuple[str, str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refused(capsys, "from-hf", hf_directory("llama"), tmp_path / "out", *degrees)
    assert not list(tmp_path.glob("out*"))


def test_truncated_files_at_any_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(hf_directory("llama"), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, 3000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "model.safetensors" in refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "out")
    path.write_bytes(whole + b"x")
    assert "after its last tensor" in refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("missing.safetensors", "does not exist"),
        ("../model.safetensors", "not a file beside"),
        ("/etc/passwd", "not a file"),
    ],
)
def test_index_that_points_nowhere_or_out(
    file: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "hf"
    shutil.copytree(hf_directory("llama"), target)
    (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(tensors_of(target), "model-00001-of-00001.safetensors")
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**names, NAME: file}}))
    message = refused(capsys, "from-hf", target, tmp_path / "out")
    assert NAME in message and named in message
    del names[NAME]
    index.write_text(json.dumps({"weight_map": names}))
    assert NAME in refused(capsys, "from-hf", target, tmp_path / "out")


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_pickles_with_code_are_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, trace = tmp_path / "hf", tmp_path / "executed"
    target.mkdir()
    shutil.copy(hf_directory("llama") / "config.json", target)
    hostile: dict[str, object] = {**tensors_of(hf_directory("llama")), "x": _Evil(trace)}
    torch.save(hostile, target / "pytorch_model.bin")
    assert "needs to run code" in refused(capsys, "from-hf", target, tmp_path / "out")
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(hostile["x"]))
    assert "pytorch_model.bin" in refused(capsys, "from-hf", target, tmp_path / "out")
    from_hf(hf_directory("llama"), tmp_path / "s")
    torch.save({"weight": _Evil(trace)}, tmp_path / "s" / "global_step0" / "layer_00-model_00-model_states.pt")
    assert "layer_00" in refused(capsys, "to-hf", tmp_path / "s", tmp_path / "out")
    assert "layer_00" in refused(capsys, "reshape", tmp_path / "s", tmp_path / "out")
    assert not trace.exists() and not list(tmp_path.glob("out*"))


def _manifest(sharded: Path) -> Path:
    return sharded / "global_step0" / "mdsp.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    from_hf(hf_directory("llama"), tmp_path / "s", 2, 2)
    return tmp_path / "s"


def test_a_flipped_bit_in_a_shard(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharded / "global_step0" / "layer_03-model_01-model_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for command in ("to-hf", "reshape"):
        message = refused(capsys, command, sharded, tmp_path / "out")
        assert "layer_03-model_01" in message and "hash" in message
    assert not list(tmp_path.glob("out*"))


def test_a_missing_shard_manifest_or_tag(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sharded / "global_step0" / "layer_03-model_01-model_states.pt").unlink()
    assert "layer_03-model_01" in refused(capsys, "to-hf", sharded, tmp_path / "out")
    _manifest(sharded).unlink()
    assert "unfinished" in refused(capsys, "to-hf", sharded, tmp_path / "out")
    for tag in ("../../etc", "gone", ""):
        (sharded / "latest").write_text(tag)
        assert "latest" in refused(capsys, "show", sharded)


@pytest.mark.parametrize("file", ["../layer.pt", "/etc/passwd", "a/../../b", "hf\\x", ""])
def test_manifest_paths_cannot_escape(
    file: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(_manifest(sharded).read_text())
    values["tensors"][0]["file"] = file
    _manifest(sharded).write_text(json.dumps(values))
    assert "not a plain path" in refused(capsys, "to-hf", sharded, tmp_path / "out")


def test_a_link_out_of_the_checkpoint(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharded / "global_step0" / "layer_03-model_01-model_states.pt"
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    assert "link" in refused(capsys, "to-hf", sharded, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda values: values["tensors"].pop(), "missing"),
        (lambda values: values["tensors"].append(values["tensors"][0]), "twice"),
        (lambda values: values["tensors"][0].update(shape=[1, 2]), "shape"),
        (lambda values: values.update(complete=False), "unfinished"),
        (lambda values: values.update(format=99), "format"),
        (lambda values: values["model"].update(hidden_size=64), "shape"),
        (lambda values: values.update(surprise=1), "surprise"),
    ],
)
def test_manifest_that_does_not_describe_the_model(
    change: Callable[[dict[str, object]], object],
    named: str,
    sharded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = json.loads(_manifest(sharded).read_text())
    change(values)
    _manifest(sharded).write_text(json.dumps(values))
    assert named in refused(capsys, "to-hf", sharded, tmp_path / "out")


def test_outputs_in_the_way(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in sharded.rglob("*"))
    assert "exists already" in refused(capsys, "from-hf", hf_directory("llama"), sharded)
    assert sorted(path.name for path in sharded.rglob("*")) == before
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "precious").write_text("")
    assert "no unfinished conversion" in refused(capsys, "from-hf", hf_directory("llama"), tmp_path / "new")
    assert (tmp_path / "new.partial" / "precious").exists()


def test_values_that_the_new_type_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NAME][0, 0] = 1e6

    source = _changed(tmp_path, grow)
    message = refused(capsys, "from-hf", source, tmp_path / "out", "--dtype", "float16")
    assert NAME in message and "float16" in message
