"""The .bin/.idx format against bytes put together by hand, round trips, and every kind of damage."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from mdsp.errors import DataError
from tests.data.raw import LETTERS, raw_dataset, write_raw

DOCUMENTS = [[5, 6, 7], [], [1], [40000, 2]]


def write(prefix: Path, documents: list[list[int]], vocab_size: int) -> None:
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.append(np.array(document, dtype=np.int64))
            writer.end_document()
        writer.commit()


def test_token_type_follows_megatron_core() -> None:
    # DType.optimal_dtype: uint16 below 65500, so that 65500 to 65535 are int32 although they would fit
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32
    assert token_dtype(128256) == np.int32


@pytest.mark.parametrize(("vocab_size", "code"), [(50000, 8), (70000, 4)])
def test_written_bytes_are_the_format(tmp_path: Path, vocab_size: int, code: int) -> None:
    write(tmp_path / "a.b", DOCUMENTS, vocab_size)
    data, index = raw_dataset([[d] for d in DOCUMENTS], code)
    assert (tmp_path / "a.b.bin").read_bytes() == data
    assert (tmp_path / "a.b.idx").read_bytes() == index
    assert sorted(os.listdir(tmp_path)) == ["a.b.bin", "a.b.idx"]


@pytest.mark.parametrize("code", sorted(LETTERS))
def test_every_token_type_and_documents_of_several_sequences_are_read(tmp_path: Path, code: int) -> None:
    documents = [[[1, 2], [3]], [], [[4], [], [5, 6]], [[7]]]
    data, index = raw_dataset(documents, code)
    (tmp_path / "d.bin").write_bytes(data)
    (tmp_path / "d.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert dataset.document_lengths.tolist() == [3, 0, 3, 1]
    assert (dataset.n_tokens, dataset.n_documents) == (7, 4)
    assert [dataset.document(i).tolist() for i in range(4)] == [[1, 2, 3], [], [4, 5, 6], [7]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65498), max_size=20), max_size=20), st.sampled_from([65499, 100000]))
def test_round_trip(documents: list[list[int]], vocab_size: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory, "d"), documents, vocab_size)
        dataset = IndexedDataset(Path(directory, "d"))
        assert dataset.n_documents == len(documents)
        assert [dataset.document(i).tolist() for i in range(len(documents))] == documents


def test_pieces_make_one_document(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", token_dtype(100)) as writer:
        writer.append(np.array([1, 2]))
        writer.append(np.array([3], dtype=np.uint16))
        writer.end_document()
        writer.commit()
    assert IndexedDataset(tmp_path / "d").document(0).tolist() == [1, 2, 3]


@pytest.mark.parametrize("token", [-1, 65536])
def test_ids_outside_the_token_type_are_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=f"{token}.*do not fit the token type uint16"):
        write(tmp_path / "d", [[1], [3, token]], 100)
    assert os.listdir(tmp_path) == []


def test_rewriting_replaces_in_one_step_and_open_readers_keep_the_old(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]], 100)
    old = IndexedDataset(tmp_path / "d")
    with IndexedWriter(tmp_path / "d", token_dtype(100)) as writer:
        writer.append(np.array([9]))
        writer.end_document()
        assert IndexedDataset(tmp_path / "d").tokens.tolist() == [1, 2, 3]
        writer.commit()
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [9]
    assert old.tokens.tolist() == [1, 2, 3]


def test_a_killed_writer_leaves_no_dataset(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, numpy as np\n"
        "from mdsp.data.indexed import IndexedWriter, token_dtype\n"
        "writer = IndexedWriter(sys.argv[1], token_dtype(100))\n"
        "writer.append(np.arange(50))\n"
        "writer.end_document()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "d")], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(DataError, match=r"d\.idx is not there"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d", [[4]], 100)
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [4]
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


def test_the_old_index_is_gone_before_new_tokens_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at each rename of a commit: what a reader then finds is a whole dataset or none."""
    replace = os.replace
    for stop in (0, 1):
        write(tmp_path / "d", [[1, 2, 3]], 100)
        calls = 0

        def limited(source: str, target: str, stop: int = stop) -> None:
            nonlocal calls
            if calls == stop:
                raise OSError(5, "Input/output error")
            calls += 1
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", limited)
            with pytest.raises(DataError, match="Input/output error"):
                write(tmp_path / "d", [[1], [2, 3]], 100)  # the same number of tokens, other documents
        with pytest.raises(DataError, match=r"d\.idx is not there"):
            IndexedDataset(tmp_path / "d")


def damage(prefix: Path, index: bytes | None = None, data: bytes | None = None) -> None:
    if index is not None:
        Path(f"{prefix}.idx").write_bytes(index)
    if data is not None:
        Path(f"{prefix}.bin").write_bytes(data)


def patched(raw: bytes, offset: int, layout: str, value: int) -> bytes:
    return raw[:offset] + struct.pack(layout, value) + raw[offset + struct.calcsize(layout) :]


def test_damage_is_named(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    write_raw(prefix, [[1, 2, 3], [4, 5]])
    data, index = Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
    # header 34 bytes; lengths at 34; pointers at 42; document boundaries at 58
    cases = [
        (index, data[:-1], r"d\.bin is truncated: 9 bytes, d\.idx describes 10"),
        (index, data + b"\0\0", r"d\.bin is longer than its index says"),
        (index, b"", r"d\.bin is truncated: 0 bytes"),
        (b"", data, r"d\.idx is not a Megatron index"),
        (b"TNTIDX\0\0" + index[8:], data, r"TNTIDX"),
        (index[:20], data, r"d\.idx is truncated: 20 bytes, the header alone has 34"),
        (index[:-3], data, r"d\.idx is truncated: 79 bytes"),
        (index + b"\0", data, r"d\.idx is damaged: 83 bytes"),
        (index + b"\0\0", data, r"multimodal"),
        (patched(index, 9, "<Q", 2), data, r"version 2, only version 1"),
        (patched(index, 17, "<B", 77), data, r"token type code 77"),
        (patched(index, 17, "<B", 7), data, r"floating-point numbers \(type code 7\)"),
        (patched(index, 18, "<Q", 2**63), data, r"d\.idx is truncated"),
        (patched(index, 34, "<i", -3), data, r"sequence 0 has length -3"),
        (patched(index, 34, "<i", 2), data, r"sequence 1 does not start where"),
        (patched(index, 50, "<q", 4), data, r"sequence 1 does not start where"),
        (patched(index, 58, "<q", 1), data, r"must run from 0 to 2, they run from 1 to 2"),
        (patched(index, 74, "<q", 1), data, r"must run from 0 to 2, they run from 0 to 1"),
        (patched(index, 66, "<q", 5), data, r"document 1 ends before it starts"),
    ]
    for bad_index, bad_data, message in cases:
        damage(prefix, bad_index, bad_data)
        with pytest.raises(DataError, match=message):
            IndexedDataset(prefix)
    damage(prefix, index, data)
    assert IndexedDataset(prefix).tokens.tolist() == [1, 2, 3, 4, 5]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_index_is_read_or_refused_but_never_crashes(choose: st.DataObject) -> None:
    data, index = raw_dataset([[[1, 2, 3]], [[4], [5]]], 8)
    at = choose.draw(st.integers(0, len(index) - 1))
    byte = choose.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as directory:
        damage(Path(directory, "d"), index[:at] + bytes([byte]) + index[at + 1 :], data)
        try:
            dataset = IndexedDataset(Path(directory, "d"))
        except DataError:
            return
        assert int(dataset.document_lengths.sum()) == dataset.n_tokens


def test_a_missing_file_and_an_unreadable_one(tmp_path: Path) -> None:
    prefix = write_raw(tmp_path / "d", [[1]])
    (tmp_path / "d.bin").unlink()
    with pytest.raises(DataError, match=r"d\.bin is not there"):
        IndexedDataset(prefix)
    (tmp_path / "d.bin").mkdir()
    with pytest.raises(DataError):
        IndexedDataset(prefix)
