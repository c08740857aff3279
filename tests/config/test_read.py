"""Reading JSON strictly, and `--set`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from mdsp.config.read import apply_overrides, read_json
from mdsp.errors import ConfigError
from tests.config.files import document, write


def test_reads_an_object(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, '\ufeff{"a": [1, 2.5, "ü", null]}')) == {"a": [1, 2.5, "ü", None]}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"a": 1, "a": 2}', 'key "a" appears twice'),
        ('{"x": {"b": 1, "b": 1}}', 'key "b" appears twice'),
        ('{"a": 1} x', "more text follows"),
        ('{"a": 1}}', "more text follows"),
        ('{\n  // fast\n  "a": 1}', "JSON has no comments"),
        ('{"a": 1} # end', "JSON has no comments"),
        ('{"a": 1,}', "comma before a closing bracket"),
        ('{"a": 1', "ends too early"),
        ("", "ends too early"),
        ("{'a': 1}", "not JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
        ("[1]", "a list"),
        ("3", "a number"),
        ('"a"', "a string"),
        ("null", "null"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_says_what_is_not_json(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)


def test_position_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json:3:3: JSON has no comments"):
        read_json(write(tmp_path, '{"a": 1,\n "b": 2,\n  // c\n "d": 3}'))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.json: cannot read the configuration file: No such file"):
        read_json(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_json(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x80\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_json(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot read"):
        read_json("a\0b")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("mdsp.parallel.tensor=4", ("mdsp", "parallel", "tensor"), 4),
        ("mdsp.train.schedule.kind=wsd", ("mdsp", "train", "schedule", "kind"), "wsd"),
        ("mdsp.checkpoint.dir=runs/a=b", ("mdsp", "checkpoint", "dir"), "runs/a=b"),
        ("mdsp.checkpoint.dir=", ("mdsp", "checkpoint", "dir"), ""),
        ('mdsp.data.train=["a", "b"]', ("mdsp", "data", "train"), ["a", "b"]),
        ("bf16.enabled=true", ("bf16", "enabled"), True),
        ("gradient_clipping=null", ("gradient_clipping",), None),
        ("optimizer.params.betas.1=0.95", ("optimizer", "params", "betas", 1), 0.95),
        ("optimizer.params.eps=1e-6", ("optimizer", "params", "eps"), 1e-6),
    ],
)
def test_override_sets_one_key(override: str, path: tuple[Any, ...], value: Any) -> None:
    before = document()
    before["optimizer"]["params"]["betas"] = [0.9, 0.999]
    after = copy.deepcopy(before)
    apply_overrides(after, [override])
    here: Any = after
    for part in path:
        here = here[part]
    assert here == value
    # Put back, nothing else has changed (but for sections made on the way).
    apply_overrides(after, [])
    assert set(before) <= set(after)


def test_later_overrides_win() -> None:
    values = document()
    apply_overrides(values, ["mdsp.train.steps=5", "mdsp.train.steps=7"])
    assert values["mdsp"]["train"]["steps"] == 7


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("mdsp.train.steps", "form key=value"),
        ("=3", "form key=value"),
        ("mdsp..steps=3", "form key=value"),
        ("mdsp.trian.steps=3", 'mdsp.trian is not a known key; did you mean "train"?'),
        ("mdsp.parallel.tensr=3", 'did you mean "tensor"?'),
        ("train_batchsize=3", 'did you mean "train_batch_size"?'),
        ("nebula.enabled=true", "removed from DeepSpeed"),
        ("zero_optimization.stage3_max_live_parameters=3", "ZeRO-3"),
        ("pipeline.stages=2", "mdsp.parallel.pipeline"),
        ("optimizer.type.x=2", 'optimizer.type is "AdamW" and has no keys inside it'),
        ("optimizer.params.betas.2=0.9", "2 is no index of optimizer.params.betas"),
        ("optimizer.params.betas.x=0.9", "x is no index"),
        ("mdsp.train.steps=NaN", "not a JSON number"),
        ("mdsp.train.steps=1e999", "too large"),
    ],
)
def test_override_that_is_refused(override: str, named: str) -> None:
    values = document()
    values["optimizer"]["params"]["betas"] = [0.9, 0.999]
    with pytest.raises(ConfigError) as caught:
        apply_overrides(values, [override])
    assert named in str(caught.value)
    assert str(caught.value).startswith(f"--set {override}: ")
