"""`mdsp config explain`, and docs/configuration.md against it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mdsp.config.explain import FREE_SECTIONS, all_keys, as_markdown, as_text, select
from mdsp.config.rules import RULES
from mdsp.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_documentation_is_what_the_schema_says() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == as_markdown(), "run: mdsp config explain --markdown > docs/configuration.md"


def test_every_key_has_its_sentence() -> None:
    keys = all_keys()
    assert {key.name for key in keys if not key.doc} == set()
    assert len({key.name for key in keys}) == len(keys)
    assert {"mdsp.parallel.tensor", "mdsp.model.n_heads", "mdsp.model.from_hf", "optimizer.params.lr"} <= {
        key.name for key in keys
    }


def test_documentation_has_every_rule_and_key() -> None:
    text = as_markdown()
    for rule in RULES:
        assert f"| `{rule.key}` | {rule.statement} |" in text
    for key in all_keys():
        if key.name not in FREE_SECTIONS:  # their content is listed, in tables of their own
            assert re.search(rf"^\| `([a-z_.]+\.)?{key.name.rpartition('.')[2]}` \|", text, re.MULTILINE), key.name


def test_one_key_and_one_section() -> None:
    (tensor,) = select("mdsp.parallel.tensor")
    assert (tensor.type, tensor.default) == ("integer > 0", "1")
    assert as_text([tensor]).startswith("mdsp.parallel.tensor  (integer > 0; default 1)\n    Tensor-parallel degree")
    assert {key.name for key in select("bf16")} == {
        "bf16.enabled",
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
    }
    with pytest.raises(ConfigError, match='did you mean "mdsp.parallel"'):
        select("mdsp.paralel")
    with pytest.raises(ConfigError, match="removed from DeepSpeed"):
        select("nebula")
