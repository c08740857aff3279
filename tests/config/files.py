"""A small legal configuration for tests to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def document() -> dict[str, Any]:
    """A legal file for 8 ranks: tensor 2 x pipeline 2 x data 2."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "mdsp": {
            "model": {"family": "gpt2", "n_layers": 6, "hidden_size": 48, "n_heads": 4, "vocab_size": 300},
            "parallel": {"tensor": 2, "pipeline": 2},
            "data": {"seq_length": 32},
        },
    }


def write(folder: Path, content: Any) -> Path:
    """The content as a JSON file."""
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
