"""DeepSpeed's own converter to the universal form, and comparison with what it makes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def convert_by_deepspeed(source: Path, target: Path) -> None:
    """`ds_to_universal` of a checkpoint's directory."""
    from deepspeed.checkpoint.ds_to_universal import main

    options: dict[str, Any] = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False)
    main(
        SimpleNamespace(
            input_folder=str(source), output_folder=str(target), strict=True, inject_missing_state=False, **options
        )
    )


def assert_same_states(ours: Path, theirs: Path) -> None:
    """The same files below `zero`, with the same tensors, bit for bit, and marked alike."""
    files = sorted(path.relative_to(theirs / "zero") for path in (theirs / "zero").rglob("*.pt"))
    assert files == sorted(path.relative_to(ours / "zero") for path in (ours / "zero").rglob("*") if path.is_file())
    assert len(files) > 100
    for name in files:
        if name.name == "optimizer_state.pt":
            continue
        mine = torch.load(ours / "zero" / name, weights_only=True)
        reference = torch.load(theirs / "zero" / name, weights_only=True)
        if name.name != "step.pt":
            assert mine.keys() >= reference.keys() and mine.get("vocab_tensor") == reference.get("vocab_tensor"), name
            mine, reference = mine["param"], reference["param"]
        mine, reference = torch.as_tensor(mine), torch.as_tensor(reference)
        assert mine.dtype == reference.dtype and torch.equal(mine, reference), name
