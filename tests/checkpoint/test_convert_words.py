"""What `mdsp convert` says about places, values and sizes that are not as it needs them: one message, exit 2."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mdsp.checkpoint.sizes import bytes_in_words
from mdsp.cli import main
from mdsp.errors import ConfigError
from mdsp.families import get_family, read_hf_config
from tests.checkpoint.hf_models import copy_with, hf_directory, tensors_of
from tests.checkpoint.test_convert_refusals import refused


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (125_568, "126 kB"),
        (999_499, "999 kB"),
        (999_600, "1.00 MB"),
        (13_476_831_232, "13.5 GB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_sizes_are_told_with_their_digits(count: int, words: str) -> None:
    assert bytes_in_words(count) == words


def test_a_config_that_is_nested_too_deeply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_with(hf_directory("llama"), tmp_path / "hf", tensors_of(hf_directory("llama")))
    (source / "config.json").write_text("[" * 100_000)
    for command in (["from-hf", source, tmp_path / "out"], ["show", source], ["check", source, source]):
        assert "nested too deeply" in refused(capsys, *command)
    shutil.copy(hf_directory("llama") / "config.json", source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("[" * 100_000)  # carried as it is
    assert main(["convert", "from-hf", str(source), str(tmp_path / "s")]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "s"), str(tmp_path / "back")]) == 0


_VALUES: tuple[Any, ...] = (
    *(5, -1, 0, 1.5, 10**30, float("inf"), float("nan"), True, False),
    *("x", "32", "", [], [1], ["x"], [None], {}, {"a": 1}),
)


@pytest.mark.parametrize("case", ["gpt2", "bloom", "opt", "llama", "qwen2", "gemma2", "granite"])
def test_any_value_in_any_field_is_read_or_refused(case: str) -> None:
    """No value of a field, and none of a rotary field, ends in anything but a model or a refusal."""
    original = read_hf_config(hf_directory(case))
    family = get_family(original["model_type"])
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    configs = [{**original, key: value} for key in original for value in _VALUES]
    for key in (*rope, "beta_fast", "type", "partial_rotary_factor"):
        configs += [{**original, "rope_parameters": {**rope, key: value}} for value in _VALUES]
    for config in configs:
        try:
            family.config_from_hf(config)
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": []}, "hidden_act = []"),
        ({"architectures": 5}, "architectures = 5"),
        ({"hidden_size": "32"}, "hidden_size = '32'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope"),
    ],
)
def test_a_value_of_a_wrong_kind(
    fields: dict[str, object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copy_with(hf_directory("llama"), tmp_path / "hf", tensors_of(hf_directory("llama")), **fields)
    assert named in refused(capsys, "from-hf", source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_places_that_cannot_become_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for name, target in (("link", "empty"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
        assert f"({target})" in refused(capsys, "from-hf", hf_directory("llama"), tmp_path / name)
        assert (tmp_path / name).is_symlink()
    (tmp_path / "out.partial").write_text("")
    assert "out.partial is in the way" in refused(capsys, "from-hf", hf_directory("llama"), tmp_path / "out")
    monkeypatch.chdir(tmp_path / "empty")
    assert "name a new one inside it" in refused(capsys, "from-hf", hf_directory("llama"), ".")
    assert not list((tmp_path / "empty").iterdir()) and not (tmp_path / "nowhere").exists()


def test_a_link_to_a_finished_output_is_that_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "from-hf", str(hf_directory("llama")), str(tmp_path / "out")]) == 0
    (tmp_path / "link").symlink_to("out")
    assert main(["convert", "from-hf", str(hf_directory("llama")), str(tmp_path / "link")]) == 0
    assert "complete already" in capsys.readouterr().out


def test_nothing_is_said_to_be_kept_when_nothing_was_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    message = refused(capsys, "from-hf", hf_directory("llama"), tmp_path / "file" / "out")
    assert "Not a directory; nothing was written" in message
    assert "nothing was written" in refused(capsys, "from-hf", hf_directory("llama"), tmp_path / ("a" * 250))


def test_what_cannot_be_read_is_not_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` says with exit code 1 that two models differ, and only that."""
    long = tmp_path / ("a" * 300)
    for command in (["check", hf_directory("llama"), long], ["check", long, long], ["show", long]):
        assert "File name too long" in refused(capsys, *command)


def test_a_path_that_torch_cannot_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(os.fsdecode(os.fsencode(tmp_path / "hf") + b"\xff"))
    shutil.copytree(hf_directory("llama"), source)
    with pytest.raises(SystemExit) as caught:
        main(["convert", "from-hf", str(source), str(tmp_path / "out")])
    assert caught.value.code == 2 and "is not UTF-8" in capsys.readouterr().err


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse()


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


@pytest.mark.parametrize("change", [_sparse, _without_values])
def test_tensors_of_a_bin_file_that_are_not_plain(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(hf_directory("llama") / "config.json", tmp_path)
    tensors = tensors_of(hf_directory("llama"))
    tensors["lm_head.weight"] = change(tensors["lm_head.weight"])
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert "tensor lm_head.weight is" in refused(capsys, "from-hf", tmp_path, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_bin_file_that_is_cut_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(hf_directory("llama") / "config.json", tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors_of(hf_directory("llama")), path)
    whole = path.read_bytes()
    for length in (0, 1, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "pytorch_model.bin" in refused(capsys, "from-hf", tmp_path, tmp_path / "out")


def test_a_name_twice_in_a_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(hf_directory("llama"), tmp_path / "hf")
    entry = b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    header = b"{" + entry + b"," + entry + b"}"
    (tmp_path / "hf" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert '"a" appears twice' in refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "out")


def test_a_hugging_face_source_has_no_hashes_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "to-hf", str(hf_directory("llama")), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "hashes" not in said and "tensors of the source used once" in said


def test_the_comparison_of_logits_draws_no_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    source = str(hf_directory("llama"))
    capsys.readouterr()
    assert main(["convert", "check", source, source, "--logits"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "activations agree" in captured.out
