"""Sliding-window fields of `config.json`: which blocks see only the tokens of a window."""

from __future__ import annotations

from typing import Any

from mdsp.families.fields import HfConfig
from mdsp.model.config import ModelConfig


def layer_types(config: ModelConfig) -> list[str]:
    """`layer_types` of a model: the kind of attention of each block."""

    def slides(index: int) -> bool:
        return config.sliding_window is not None and (config.sliding_window_layers == "all" or index % 2 == 0)

    return ["sliding_attention" if slides(index) else "full_attention" for index in range(config.n_layers)]


def read_layer_types(hf: HfConfig, options: dict[str, Any], window: int | None, default: list[str]) -> None:
    """Set `sliding_window` and `sliding_window_layers` from `layer_types` (`default` where the file lacks it).

    Raises:
        ConfigError: the blocks with a window are neither all, none, nor 0, 2, 4...
    """
    types = hf.get("layer_types", default)
    count = options["n_layers"]
    every_other = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    if types == ["full_attention"] * count:
        options["sliding_window"] = None
    elif window is None:
        raise hf.refuse("layer_types", "sliding attention without a sliding_window")
    elif types == every_other:
        options |= {"sliding_window": window, "sliding_window_layers": "even" if count > 1 else "all"}
    elif types == ["sliding_attention"] * count:
        options |= {"sliding_window": window, "sliding_window_layers": "all"}
    else:
        raise hf.refuse("layer_types", "a sliding window is supported in all blocks, in none, or in blocks 0, 2, 4...")
