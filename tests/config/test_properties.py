"""Any file either loads, with numbers that fit together, or raises one ConfigError that names a key."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mdsp.config.explain import all_keys
from mdsp.config.load import resolve_run_config
from mdsp.config.read import apply_overrides
from mdsp.config.run_config import RunConfig
from mdsp.errors import ConfigError
from tests.config.files import document

COUNTS = st.integers(1, 12)
KEYS = [key.name for key in all_keys()]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
LINE = re.compile(r"^(?P<key>[^ =:]+)( = .*)?: .+", re.DOTALL)


def load(values: dict[str, Any], world_size: int) -> RunConfig | None:
    """The run, or None when it is refused; fails the test when it is refused in another way than promised."""
    try:
        run = resolve_run_config(values, world_size)
    except ConfigError as error:
        first, *lines = str(error).split("\n  ")
        assert re.fullmatch(r"configuration: \d+ problems?", first)
        assert lines
        return None
    check(run, world_size)
    return run


def check(run: RunConfig, world_size: int) -> None:
    layout, model = run.layout, run.model
    assert layout.tensor * layout.pipeline * layout.data == world_size
    assert layout.micro_batch * layout.gradient_accumulation_steps * layout.data == layout.global_batch
    assert model.n_heads % layout.tensor == 0 and model.ffn_size % layout.tensor == 0
    assert len(layout.blocks_per_stage) == layout.pipeline
    assert sum(layout.blocks_per_stage) == model.n_layers and min(layout.blocks_per_stage) >= 1
    assert run.deepspeed["train_batch_size"] == layout.global_batch
    assert run.deepspeed["train_micro_batch_size_per_gpu"] == layout.micro_batch
    assert run.deepspeed["gradient_accumulation_steps"] == layout.gradient_accumulation_steps
    assert json.loads(json.dumps(run.deepspeed)) == run.deepspeed


@settings(max_examples=300)
@given(
    world_size=st.integers(1, 64),
    degrees=st.tuples(COUNTS, COUNTS),
    shape=st.tuples(COUNTS, COUNTS, COUNTS, st.integers(1, 8), st.integers(1, 64)),
    batch=st.tuples(*[st.none() | st.integers(1, 64)] * 3),
    seq_length=st.integers(1, 64),
    switches=st.tuples(st.booleans(), st.sampled_from([None, "bf16", "fp16"]), st.integers(0, 3)),
    blocks=st.none() | st.lists(st.integers(0, 6), max_size=6),
)
def test_any_layout_loads_or_is_refused(
    world_size: int,
    degrees: tuple[int, int],
    shape: tuple[int, int, int, int, int],
    batch: tuple[int | None, int | None, int | None],
    seq_length: int,
    switches: tuple[bool, str | None, int],
    blocks: list[int] | None,
) -> None:
    n_layers, n_heads, head_dim, kv_share, ffn_size = shape
    sequence_parallel, precision, stage = switches
    values = {
        "train_batch_size": batch[0],
        "train_micro_batch_size_per_gpu": batch[1],
        "gradient_accumulation_steps": batch[2],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "mdsp": {
            "model": {
                "family": "llama",
                "n_layers": n_layers,
                "hidden_size": n_heads * head_dim,
                "n_heads": n_heads,
                "n_kv_heads": max(1, n_heads // kv_share),
                "ffn_size": ffn_size,
                "vocab_size": 100,
            },
            "parallel": {
                "tensor": degrees[0],
                "pipeline": degrees[1],
                "sequence_parallel": sequence_parallel,
                "blocks_per_stage": blocks,
            },
            "data": {"seq_length": seq_length},
        },
    }
    if precision is not None:
        values[precision] = {"enabled": True}
    load(values, world_size)


@settings(max_examples=100)
@given(tensor=st.sampled_from([1, 2, 4]), pipeline=st.integers(1, 6), data=COUNTS, batch=st.tuples(COUNTS, COUNTS))
def test_every_layout_that_fits_loads(tensor: int, pipeline: int, data: int, batch: tuple[int, int]) -> None:
    values = document()
    values["mdsp"]["parallel"] = {"tensor": tensor, "pipeline": pipeline}
    values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"] = batch
    run = load(values, tensor * pipeline * data)
    assert run is not None
    assert (run.layout.data, run.layout.global_batch) == (data, batch[0] * batch[1] * data)


@settings(max_examples=300)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_anywhere_loads_or_is_refused_by_its_key(key: str, value: Any) -> None:
    values: dict[str, Any] = document()
    here = values
    *sections, last = key.split(".")
    for section in sections:
        here = here.setdefault(section, {})
    here[last] = value
    try:
        check(resolve_run_config(values, 8), 8)
    except ConfigError as error:
        _, *lines = str(error).split("\n  ")
        named = {found["key"] for line in lines if (found := LINE.match(line))}
        assert named, str(error)
        family = key.rpartition(".")[0] or key
        assert any(name.startswith(family.split(".")[0]) or key in str(error) for name in named)


@settings(max_examples=200)
@given(
    st.lists(
        st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=12), st.text(max_size=8) | st.integers()),
        max_size=3,
    )
)
def test_any_override_is_applied_or_refused(overrides: list[str]) -> None:
    values = document()
    try:
        apply_overrides(values, overrides)
        resolve_run_config(values, 8)
    except ConfigError as error:
        assert str(error)


@settings(max_examples=100)
@given(VALUES)
def test_any_document_is_refused_or_loads(value: Any) -> None:
    if not isinstance(value, dict):
        value = {"mdsp": value}
    load(value, 8)
