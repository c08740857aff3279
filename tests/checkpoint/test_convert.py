"""Hugging Face -> shards -> Hugging Face is byte-identical, for every family at every degree; names, types, files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from mdsp.checkpoint.check import compare, compare_activations
from mdsp.checkpoint.convert import from_hf, reshape, to_hf
from mdsp.checkpoint.manifest import read_manifest
from mdsp.checkpoint.weights import HfWeights
from mdsp.families import family_names
from mdsp.model.table import parameter_table
from tests.checkpoint.hf_models import assert_same_bytes, copy_with, hf_directory, tensors_of
from tests.families.models import CASES

DEGREES = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2, 3)]
FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}


def round_trip(source: Path, work: Path, tensor: int, pipeline: int, **options: Any) -> Path:
    """Convert there and back; returns the export."""
    shutil.rmtree(work, ignore_errors=True)
    from_hf(source, work / "sharded", tensor, pipeline)
    to_hf(work / "sharded", work / "hf", **options)
    return work / "hf"


@pytest.mark.parametrize("family", family_names())
def test_every_family_at_every_degree(family: str, tmp_path: Path) -> None:
    source = hf_directory(FIRST_CASES[family])
    expected = tensors_of(source)
    for tensor, pipeline in DEGREES:
        exported = round_trip(source, tmp_path / "work", tensor, pipeline, max_shard_bytes=30_000)
        assert_same_bytes(tensors_of(exported), expected)
        original = json.loads((source / "config.json").read_text())
        assert json.loads((exported / "config.json").read_text()) == original


@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST_CASES.values()])
def test_further_shapes(case: str, tmp_path: Path) -> None:
    source = hf_directory(case)
    for tensor, pipeline in ((4, 3), (2, 2)):
        assert_same_bytes(tensors_of(round_trip(source, tmp_path / "work", tensor, pipeline)), tensors_of(source))


@pytest.mark.parametrize("family", family_names())
def test_transformers_loads_the_export_without_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    source = hf_directory(FIRST_CASES[family])
    exported = round_trip(source, tmp_path / "work", 2, 2, max_shard_bytes=30_000)
    transformers.logging.enable_propagation()
    caplog.clear()
    recwarn.clear()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")], caplog.text
    assert not list(recwarn)
    reference = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = torch.arange(10).unsqueeze(0)
    assert torch.equal(model(ids).logits, reference(ids).logits)


def test_reshape_equals_direct_conversion(tmp_path: Path) -> None:
    source = hf_directory("llama")
    from_hf(source, tmp_path / "a", 4, 3)
    reshape(tmp_path / "a", tmp_path / "b", 2, 1)
    from_hf(source, tmp_path / "c", 2, 1)
    for path in (tmp_path / "c" / "global_step0").glob("layer_*"):
        assert path.read_bytes() == (tmp_path / "b" / "global_step0" / path.name).read_bytes()
    assert not compare(tmp_path / "a", tmp_path / "b").differences
    to_hf(tmp_path / "b", tmp_path / "hf")
    assert_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(source))


def test_files_are_what_the_pipeline_engine_reads(tmp_path: Path) -> None:
    """Keys and padded shapes of each layer's file, loaded as DeepSpeed does (without mapping)."""
    from_hf(hf_directory("gpt2"), tmp_path / "s", 4, 2)
    directory = tmp_path / "s" / (tmp_path / "s" / "latest").read_text().strip()
    embedding = torch.load(directory / "layer_00-model_03-model_states.pt", weights_only=True)
    assert {key: tuple(value.shape) for key, value in embedding.items()} == {"weight": (32, 32)}
    assert torch.equal(embedding["weight"][3:], torch.zeros(29, 32))  # 99 true rows: the last shard has 96, 97, 98
    block = torch.load(directory / "layer_02-model_00-model_states.pt", weights_only=True)
    whole = tensors_of(hf_directory("gpt2"))["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(block["attention.key.weight"], whole.t()[32:40])
    assert not (directory / "layer_06-model_00-model_states.pt").exists()  # the tied head
    assert len(list(directory.glob("mp_rank_*_model_states.pt"))) == 8


def test_more_than_a_hundred_layers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=105, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    exported = round_trip(tmp_path / "hf", tmp_path / "work", 2, 3)
    assert (tmp_path / "work" / "sharded" / "global_step0" / "layer_106-model_01-model_states.pt").is_file()
    assert_same_bytes(tensors_of(exported), tensors_of(tmp_path / "hf"))


def test_names_without_prefix_buffers_and_shuffled_shards(tmp_path: Path) -> None:
    source = hf_directory("gpt2")
    tensors = tensors_of(source)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"]
    target = tmp_path / "hf"
    target.mkdir()
    shutil.copy(source / "config.json", target)
    names = sorted(bare, key=lambda name: name[::-1])
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = names[number::3]
        save_file({name: bare[name].clone() for name in part}, target / file)
        weight_map |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    summary = from_hf(target, tmp_path / "s", 2, 2)
    assert set(summary.left_aside) == {"h.0.attn.bias", "h.0.attn.masked_bias", "lm_head.weight"}
    to_hf(tmp_path / "s", tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors)


def test_bin_files_and_mixed_types(tmp_path: Path) -> None:
    source = hf_directory("llama")
    mixed = {
        name: tensor.to(torch.bfloat16 if "mlp" in name else torch.float16 if "norm" in name else torch.float32)
        for name, tensor in tensors_of(source).items()
    }
    target = tmp_path / "hf"
    target.mkdir()
    shutil.copy(source / "config.json", target)
    torch.save(mixed, target / "pytorch_model.bin")
    exported = round_trip(target, tmp_path / "work", 2, 2)
    assert_same_bytes(tensors_of(exported), mixed)
    torch.save(mixed, target / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    exported = round_trip(target, tmp_path / "work", 4, 1)
    assert_same_bytes(tensors_of(exported), mixed)


@pytest.mark.parametrize("case", ["qwen2", "gemma", "gptj", "llama", "gpt2", "opt", "bloom", "gpt_neox"])
def test_tie_word_embeddings_absent_means_the_class_default(case: str, tmp_path: Path) -> None:
    source = hf_directory(case)
    bare = copy_with(source, tmp_path / "hf", tensors_of(source), tie_word_embeddings=None)
    tied = transformers.AutoConfig.for_model(CASES[case][0]).tie_word_embeddings
    assert HfWeights(bare).config.tied_head == tied
    assert HfWeights(bare).config == HfWeights(source).config


def test_dtype_option(tmp_path: Path) -> None:
    source = hf_directory("llama")
    from_hf(source, tmp_path / "s", 2, 1, dtype=torch.bfloat16)
    to_hf(tmp_path / "s", tmp_path / "out")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(source).items()}
    assert_same_bytes(tensors_of(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_generation_config_and_template_are_carried(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(hf_directory("llama"), source)
    extra = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"eos_token": "</s>"}',
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"temperature": 0.6}',
        "LICENSE": "text",
    }
    for name, text in extra.items():
        (source / name).write_text(text)
    (source / "modeling_evil.py").write_text("raise SystemExit")
    from_hf(source, tmp_path / "a", 2, 1)
    reshape(tmp_path / "a", tmp_path / "b", 1, 2)
    to_hf(tmp_path / "b", tmp_path / "out")
    for name, text in extra.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert not (tmp_path / "out" / "modeling_evil.py").exists()


def test_a_rank_reads_only_its_slice() -> None:
    weights = HfWeights(hf_directory("llama"))
    for parameter in parameter_table(weights.config):
        whole = weights.local_tensor(parameter, 1, 0)
        for tensor in (2, 4):
            for rank in range(tensor):
                shard = parameter.shard(tensor, rank)
                local = weights.pieces(parameter, tensor, rank)
                expected = whole if shard is None else whole.narrow(shard.dim, shard.start, shard.stop - shard.start)
                assert torch.equal(local.materialize(), expected)
                # Views of the mapped file, not copies of it.
                assert {view.untyped_storage().nbytes() for view in local.views} == {
                    (weights.path / "model.safetensors").stat().st_size
                }


def test_check_finds_the_parameter_and_the_layer(tmp_path: Path) -> None:
    source = hf_directory("llama")
    from_hf(source, tmp_path / "s", 2, 2)
    assert compare(tmp_path / "s", source).differences == ()
    assert max(layer.relative for layer in compare_activations(tmp_path / "s", source)) < 1e-5
    tensors = tensors_of(source)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] += 1.0
    changed = copy_with(source, tmp_path / "changed", tensors)
    assert compare(tmp_path / "s", changed).differences == ("blocks.1.mlp.up.weight: values differ",)
    layers = compare_activations(tmp_path / "s", changed)
    first = next(layer.name for layer in layers if layer.relative > 1e-4)
    assert first == "block 1"


def test_manifest_describes_every_shard(tmp_path: Path) -> None:
    from_hf(hf_directory("llama"), tmp_path / "s", 4, 3)
    manifest, directory = read_manifest(tmp_path / "s")
    assert (manifest.tensor, manifest.pipeline, manifest.blocks_per_stage) == (4, 3, (1, 1, 1))
    names = {(entry.parameter, entry.rank) for entry in manifest.tensors}
    assert names == {(p.name, rank) for p in parameter_table(manifest.model) for rank in range(4)}
    for entry in manifest.tensors:
        assert tuple(torch.load(directory / entry.file, weights_only=True)[entry.key].shape) == entry.shape
