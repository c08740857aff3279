"""Damage in any stored tensor is noticed by an export, which hashes its source while it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mdsp.checkpoint.convert import from_hf, to_hf
from mdsp.checkpoint.manifest import StoredTensor, read_manifest
from mdsp.checkpoint.pieces import raw_bytes
from mdsp.checkpoint.source_hashes import SourceHashes
from mdsp.checkpoint.weights import ShardedWeights, whole
from mdsp.cli import main
from mdsp.errors import CheckpointError
from mdsp.model.table import parameter_table
from tests.checkpoint.hf_models import hf_directory


def _damage(directory: Path, entry: StoredTensor, element: bytes) -> bytes:
    """Replace the last element of a stored tensor; returns what the file was."""
    path = directory / entry.file
    before = path.read_bytes()
    stored = bytes(raw_bytes(torch.load(path, weights_only=True)[entry.key].reshape(-1)))
    end = before.index(stored) + len(stored)
    assert before.count(stored) == 1
    path.write_bytes(before[: end - len(element)] + element + before[end:])
    return before


# llama: rows, columns, copies, padding of the vocabulary; gpt2: transposed and fused as well.
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_last_element_of_every_tensor(case: str, tmp_path: Path) -> None:
    from_hf(hf_directory(case), tmp_path / "s", 2, 1)
    manifest, directory = read_manifest(tmp_path / "s")
    parameters = parameter_table(manifest.model).by_name
    kinds = set()
    for entry in manifest.tensors:
        parameter = parameters[entry.parameter]
        shard = parameter.shard(2, entry.rank)
        kinds.add("copy" if shard is None else ("rows", "columns")[shard.dim])
        if shard is not None and shard.stop - shard.start < entry.shape[shard.dim]:
            kinds.add("padding")
        before = _damage(directory, entry, b"\x01\x00\x80\x3e")
        with pytest.raises(CheckpointError, match=rf"{entry.file}: {entry.key} does not match its hash"):
            to_hf(tmp_path / "s", tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
        (directory / entry.file).write_bytes(before)
    assert kinds == {"copy", "rows", "columns", "padding"}
    to_hf(tmp_path / "s", tmp_path / "out")


def test_damage_that_is_also_a_nan_is_called_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_hf(hf_directory("llama"), tmp_path / "s", 2, 1)
    manifest, directory = read_manifest(tmp_path / "s")
    entry = next(entry for entry in manifest.tensors if entry.parameter == "blocks.1.mlp.up.weight" and entry.rank == 1)
    _damage(directory, entry, b"\x00\x00\xc0\x7f")
    capsys.readouterr()
    assert main(["convert", "to-hf", str(tmp_path / "s"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "does not match its hash" in error and "NaN" not in error and error.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_reading_in_order_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split rows and columns are hashed completely by what the export reads."""
    from_hf(hf_directory("llama"), tmp_path / "s", 2, 1)
    weights = ShardedWeights(tmp_path / "s")
    left: list[int] = []

    def finish(self: SourceHashes) -> list[str]:
        left.append(sum(len(source.data) - source.done for source in self._sources))
        return original(self)

    original = SourceHashes.finish
    monkeypatch.setattr(SourceHashes, "finish", finish)
    to_hf(tmp_path / "s", tmp_path / "out")
    copies = sum(
        parameter.numel * weights.dtype(parameter).itemsize
        for parameter in parameter_table(weights.config).by_name.values()
        if parameter.shard(2, 0) is None
    )
    padding = 0
    for entry in weights.manifest.tensors:
        parameter = parameter_table(weights.config).by_name[entry.parameter]
        shard = parameter.shard(2, entry.rank) or whole(parameter)
        rows = entry.shape[shard.dim] - (shard.stop - shard.start)
        padding += rows * torch.Size(entry.shape[1:]).numel() * weights.dtype(parameter).itemsize
    assert sum(left) == copies + padding
