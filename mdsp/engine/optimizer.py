"""The optimizer and its parameter groups, the same groups on every stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mdsp.errors import ConfigError
from mdsp.tensor_parallel.parameters import entry_of


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, decayed (matrices) and not decayed (norms and biases), as the parameter table says.

    Every stage holds at least one block and so has both: ZeRO stage 1 reduces the norm once per group, and stages with
    different groups would wait for each other forever.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if entry_of(parameter).decay else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(section: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer that DeepSpeed's "optimizer" section describes.

    Built here and not by DeepSpeed: its FusedAdam needs a compiler, and its plain torch Adam is not fused.
    """
    params = dict(section.get("params", {}))
    kind = str(section["type"]).lower()
    for ours in ("torch_adam", "adam_w_mode"):  # choices between DeepSpeed's own implementations
        params.pop(ours, None)
    groups = parameter_groups(parameters, params.pop("weight_decay", 0.0))
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    if kind == "sgd":
        return torch.optim.SGD(groups, **params)
    if kind in ("adam", "adamw"):
        cls = (
            torch.optim.AdamW
            if kind == "adamw" or section.get("params", {}).get("adam_w_mode", True)
            else torch.optim.Adam
        )
        return cls(groups, fused=True, **params)
    raise ConfigError(f"optimizer.type = {section['type']!r}: mdsp trains with Adam, AdamW or SGD")
