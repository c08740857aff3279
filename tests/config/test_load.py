"""From a file to a RunConfig: what is resolved, what is filled in, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mdsp.config.load import load_run_config, resolve_run_config
from mdsp.errors import ConfigError
from tests.config.files import document, write


def test_resolved_run(tmp_path: Path) -> None:
    run = load_run_config(write(tmp_path, document()), ["mdsp.train.steps=7"], 8)
    layout = run.layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.world_size) == (2, 2, 2, 8)
    assert (layout.micro_batch, layout.gradient_accumulation_steps, layout.global_batch) == (2, 4, 16)
    assert sum(layout.blocks_per_stage) == 6
    assert layout.bubble == pytest.approx(1 / 5)
    assert run.mdsp.train.steps == 7
    assert run.model.hidden_size == 48 and run.model.position == "learned"
    assert run.precision == "fp32"


def test_deepspeed_keys_are_filled_in() -> None:
    assert resolve_run_config(document(), 8).deepspeed == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
        "pipeline": {"use_reentrant": False},
    }


def test_what_the_user_sets_stays() -> None:
    values = document() | {
        "gradient_clipping": 0.5,
        "steps_per_print": 3,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": None},
        "bf16": {"enabled": True},
        "pipeline": {"grad_partitioned": False},
        "wandb": {"enabled": True, "group": None},
        "tensorboard": None,
    }
    values["mdsp"]["parallel"]["sequence_parallel"] = True
    before = copy.deepcopy(values)
    run = resolve_run_config(values, 8)
    assert values == before
    assert run.precision == "bf16"
    assert run.deepspeed["gradient_clipping"] == 0.5
    assert run.deepspeed["steps_per_print"] == 3
    assert run.deepspeed["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 5e8}
    assert run.deepspeed["data_types"] == {"grad_accum_dtype": "fp32"}
    assert run.deepspeed["pipeline"] == {
        "grad_partitioned": False,
        "pipe_partitioned": False,
        "use_reentrant": False,
    }
    assert run.deepspeed["wandb"] == {"enabled": True}
    assert "tensorboard" not in run.deepspeed and "mdsp" not in run.deepspeed


def test_optimizer_names_are_deepspeeds() -> None:
    values = document() | {"optimizer": {"type": "sgd", "params": {"lr": 0.1}}}
    assert resolve_run_config(values, 8).deepspeed["optimizer"] == {"type": "SGD", "params": {"lr": 0.1}}
    values["optimizer"]["type"] = "adam"
    assert resolve_run_config(values, 8).deepspeed["optimizer"]["type"] == "Adam"


def test_family_defaults_and_given_options() -> None:
    values = document()
    values["mdsp"]["model"] |= {"family": "llama", "n_kv_heads": 2, "norm_eps": 1e-4}
    model = resolve_run_config(values, 8).model
    assert (model.family, model.norm, model.position, model.gated_mlp) == ("llama", "rmsnorm", "rotary", True)
    assert (model.n_kv_heads, model.norm_eps) == (2, 1e-4)


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    """A Hugging Face directory, as `transformers` writes its configuration."""
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 6,
        "n_embd": 48,
        "n_head": 4,
        "vocab_size": 300,
        "n_positions": 64,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_model_from_hugging_face(hf_dir: Path) -> None:
    values = document()
    values["mdsp"]["model"] = {"from_hf": str(hf_dir), "hidden_dropout": 0.0}
    model = resolve_run_config(values, 8).model
    assert (model.family, model.n_layers, model.hidden_size, model.max_positions) == ("gpt2", 6, 48, 64)
    assert (model.hidden_dropout, model.attention_dropout) == (0.0, 0.1)
    values["mdsp"]["data"]["seq_length"] = 128
    with pytest.raises(ConfigError, match="max_positions 64"):
        resolve_run_config(values, 8)


def test_hugging_face_models_cannot_be_changed(hf_dir: Path) -> None:
    values = document()
    values["mdsp"]["model"] = {"from_hf": str(hf_dir), "n_layers": 3, "droput": 0.1, "hidden_dropout": 2}
    with pytest.raises(ConfigError) as caught:
        resolve_run_config(values, 8)
    assert str(caught.value).split("\n  ")[1:] == [
        "mdsp.model.n_layers = 3: comes from the Hugging Face directory; only embedding_dropout, hidden_dropout, "
        "attention_dropout, init_std may be changed",
        "mdsp.model.hidden_dropout = 2: must be number >= 0 and < 1 or null",
        'mdsp.model.droput = 0.1: is not a known key; did you mean "hidden_dropout"?',
    ]


def test_missing_hugging_face_directory() -> None:
    values = document()
    values["mdsp"]["model"] = {"from_hf": "nowhere"}
    with pytest.raises(ConfigError, match=r'mdsp.model.from_hf = "nowhere": .*config.json'):
        resolve_run_config(values, 8)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"train_batchsize": 3}, ['train_batchsize = 3: is not a known key; did you mean "train_batch_size"?']),
        ({"zzz": 1}, ["zzz = 1: is not a known key; see `mdsp config explain`"]),
        ({"train_batch_size": "auto"}, ['train_batch_size = "auto": must be integer > 0 and <= 1e+09 or null']),
        ({"train_batch_size": 8.0}, ["train_batch_size = 8.0: must be integer > 0 and <= 1e+09 or null"]),
        ({"train_batch_size": True}, ["train_batch_size = true: must be integer > 0 and <= 1e+09 or null"]),
        ({"train_batch_size": 0}, ["train_batch_size = 0: must be integer > 0 and <= 1e+09 or null"]),
        ({"gradient_clipping": -1}, ["gradient_clipping = -1: must be number >= 0"]),
        ({"bf16": True}, ["bf16 = true: must be object"]),
        ({"bf16": {"enabled": 1}}, ["bf16.enabled = 1: must be true or false"]),
        ({"bf16": {"enable": True}}, ['bf16.enable = true: is not a known key; did you mean "enabled"?']),
        ({"optimizer": None}, ["optimizer: is required: object; The optimizer"]),
        ({"optimizer": {"params": {"lr": 1}}}, ['optimizer.type: is required: string; "AdamW", "Adam" or "SGD"']),
        ({"optimizer": {"type": "AdamW"}}, ["optimizer.params.lr: is required: number > 0; Peak learning rate; "]),
        ({"scheduler": {"type": "Cosine"}}, ['scheduler.type = "Cosine": must be "LRRangeTest", "OneCycle", ']),
        (
            {"data_types": {"grad_accum_dtype": "fp8"}},
            ['data_types.grad_accum_dtype = "fp8": must be "fp32", "bf16" or'],
        ),
        ({"bfloat16": {"enabled": True}}, ['bfloat16 = {"enabled": true}: is an old name; write "bf16"']),
        ({"elasticity": {}}, ["elasticity = {}: was removed from DeepSpeed"]),
        ({"zero_optimization": {"offload_param": {}}}, ["zero_optimization.offload_param = {}: needs ZeRO-3"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["zero_optimization.offload_optimizer = {"]),
        ({"activation_checkpointing": {}}, ["activation_checkpointing = {}: is not how mdsp recomputes"]),
        ({"mdsp": None}, ["mdsp: is required: object"]),
        ({"mdsp": []}, ["mdsp = []: must be object"]),
    ],
)
def test_top_level_mistakes(change: dict[str, Any], lines: list[str]) -> None:
    expect_lines(document() | change, lines)


@pytest.mark.parametrize(
    ("section", "change", "lines"),
    [
        ("parallel", {"tensor": "2"}, ['mdsp.parallel.tensor = "2": must be integer > 0']),
        ("parallel", {"tensr": 2}, ['mdsp.parallel.tensr = 2: is not a known key; did you mean "tensor"?']),
        ("parallel", {"blocks_per_stage": [1, "5"]}, ['mdsp.parallel.blocks_per_stage.1 = "5": must be integer']),
        ("data", {"train": 3}, ["mdsp.data.train = 3: must be string or list of string or null"]),
        ("train", {"recompute": "some"}, ['mdsp.train.recompute = "some": must be "none", "selective" or "full"']),
        ("train", {"schedule": {"min_ratio": 2}}, ["mdsp.train.schedule.min_ratio = 2: must be number >= 0 and <= 1"]),
        ("model", {"n_layers": "6"}, ['mdsp.model.n_layers = "6": must be integer > 0']),
        ("model", {"n_layer": 6}, ['mdsp.model.n_layer = 6: is not a known key; did you mean "n_layers"?']),
        ("model", {"norm": "rms"}, ['mdsp.model.norm = "rms": must be "layernorm" or "rmsnorm"']),
        ("model", {"family": "lama"}, ['mdsp.model.family = "lama": is not a known family; did you mean "llama"?']),
        ("model", {"family": 3}, ["mdsp.model.family = 3: must be string"]),
        ("model", {"n_heads": 5}, ["mdsp.model: gpt2 model: hidden_size 48 is not a multiple of n_heads 5"]),
        ("model", {"rope_scaling": {"kind": "linear"}}, ["mdsp.model.rope_scaling.factor: is required: number > 0"]),
        ("model", {"rope_scaling": 3}, ["mdsp.model.rope_scaling = 3: must be object or null"]),
    ],
)
def test_mistakes_in_our_section(section: str, change: dict[str, Any], lines: list[str]) -> None:
    values = document()
    values["mdsp"][section] = values["mdsp"].get(section, {}) | change
    expect_lines(values, lines)


def expect_lines(values: dict[str, Any], starts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_run_config(values, 8)
    _, *lines = str(caught.value).split("\n  ")
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_model_without_its_sizes() -> None:
    values = document()
    values["mdsp"]["model"] = {}
    expect_lines(
        values,
        [
            'mdsp.model: needs "family"',
            "mdsp.model.n_layers: is required",
            "mdsp.model.hidden_size: is required",
            "mdsp.model.n_heads: is required",
            "mdsp.model.vocab_size: is required",
        ],
    )


def test_mistakes_everywhere_come_together(tmp_path: Path) -> None:
    values = document() | {"fp17": {}, "steps_per_print": "x"}
    values["mdsp"]["model"]["n_head"] = 3
    path = write(tmp_path, values)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [], 8)
    assert str(caught.value).startswith(f"{path}: 3 problems\n")
