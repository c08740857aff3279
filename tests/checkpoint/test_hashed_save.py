"""Files written piece by piece are those that torch.load reads, with the hash of what lies on the disk."""

from __future__ import annotations

import errno
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdsp.checkpoint.engine_io import read_file, to_host
from mdsp.checkpoint.hashed_save import hashed_save

SHARED = torch.arange(6.0)
tensors = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 100).to(dtype),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
)
states = st.recursive(
    tensors | st.integers() | st.text(max_size=3) | st.none() | st.just(SHARED),
    lambda inner: (
        st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(OrderedDict, st.dictionaries(st.text(max_size=4), inner, max_size=3))
    ),
    max_leaves=15,
)


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(state=states, mmap=st.booleans())
def test_what_is_written_is_read(state: Any, mmap: bool, tmp_path: Path) -> None:
    size, digest = hashed_save(to_host(state, copy=False), tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    assert (size, digest) == (len(data), xxhash.xxh3_128(data).hexdigest())
    assert_same(read_file(tmp_path / "file.pt", mmap=mmap), state)


def test_large_tensors_and_views(tmp_path: Path) -> None:
    """Several chunks; views of a flat buffer, of which only their own part is written."""
    flat = torch.arange(5_000_000, dtype=torch.float32)
    state = {"a": flat[:3_000_000], "b": {"c": flat[3_000_000:].view(1000, -1), "d": flat[10:20]}, "e": [flat[5]]}
    size, digest = hashed_save(to_host(state, copy=True), tmp_path / "file.pt")
    assert size < flat.nbytes + 100_000
    assert digest == xxhash.xxh3_128((tmp_path / "file.pt").read_bytes()).hexdigest()
    assert_same(read_file(tmp_path / "file.pt"), state)


def test_a_full_disk_is_an_os_error_that_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            hashed_save({"a": torch.zeros(100_000)}, tmp_path / "file.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG


def test_a_missing_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        hashed_save({"a": torch.zeros(3)}, tmp_path / "nowhere" / "file.pt")
