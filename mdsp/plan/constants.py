"""The constants of the time model: what software gets out of a datasheet. Few, global, physical, each with bounds.

Their values are fitted by `mdsp.plan.fit` on published runs and stored in `constants.json`. The prior (a centre and a
relative width, both chosen from what the quantity is) keeps a constant that few runs show near its physical value.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

CONSTANTS_FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known about a constant before any run is seen."""

    centre: float
    width: float
    """Standard deviation of its logarithm."""
    low: float
    high: float
    meaning: str


PRIORS: dict[str, Prior] = {
    "gemm_ampere": Prior(0.85, 0.10, 0.5, 1.0, "matrix-product rate / datasheet peak, 16 bit, Ampere (and Volta)"),
    "gemm_hopper": Prior(0.78, 0.10, 0.4, 1.0, "the same on Hopper, whose clock drops under load"),
    "gemm_blackwell": Prior(0.75, 0.10, 0.4, 1.0, "the same on Blackwell, and CDNA until measured"),
    "gemm_fp8": Prior(0.85, 0.15, 0.4, 1.0, "fp8 rate / (16-bit rate x peak ratio), casts and scaling included"),
    "gemm_dim": Prior(150.0, 0.5, 0.0, 600.0, "a product whose shortest side is this long runs at half the rate"),
    "attention_flash": Prior(0.55, 0.25, 0.15, 1.0, "flash attention core rate / matrix-product rate"),
    "attention_core": Prior(0.45, 0.25, 0.15, 1.0, "rate of the unfused attention core / matrix-product rate"),
    "softmax_bytes": Prior(10.0, 0.3, 4.0, 24.0, "bytes per attention score moved by an unfused softmax, forward"),
    "elementwise": Prior(1.3, 0.25, 0.7, 3.0, "memory traffic of fused element-wise work / the least possible"),
    "eager": Prior(2.0, 0.25, 1.0, 4.0, "factor on it where each operation is a kernel of its own"),
    "hbm": Prior(0.85, 0.05, 0.6, 0.95, "reached / peak memory bandwidth"),
    "link": Prior(0.75, 0.15, 0.4, 0.95, "reached / peak bandwidth in a node, large messages"),
    "network": Prior(0.75, 0.15, 0.3, 0.95, "reached / peak bandwidth between nodes"),
    "tensor_exposed": Prior(0.5, 0.25, 0.1, 1.0, "share of tensor-parallel communication not hidden by overlap"),
    "data_exposed": Prior(0.4, 0.3, 0.05, 1.0, "share of data-parallel communication not hidden by overlap"),
    "accumulate_bytes": Prior(8.0, 0.3, 2.0, 24.0, "bytes per parameter and micro-batch of gradient accumulation"),
    "deepspeed_accumulate_bytes": Prior(30.0, 0.4, 4.0, 80.0, "the same in DeepSpeed's pipeline engine, all its work"),
    "zb1_bubble": Prior(0.4, 0.3, 0.1, 1.0, "bubble of ZB-1p / bubble of 1F1B (theory: 1/3 when F = B = W)"),
    "scale": Prior(0.010, 0.5, 0.0, 0.03, "slow-down per doubling of the devices beyond one node: stragglers, jitter"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Constants:
    """One value per entry of `PRIORS`."""

    gemm_ampere: float
    gemm_hopper: float
    gemm_blackwell: float
    gemm_fp8: float
    gemm_dim: float
    attention_flash: float
    attention_core: float
    softmax_bytes: float
    elementwise: float
    eager: float
    hbm: float
    link: float
    network: float
    tensor_exposed: float
    data_exposed: float
    accumulate_bytes: float
    deepspeed_accumulate_bytes: float
    zb1_bubble: float
    scale: float


def constants_from(values: Mapping[str, float]) -> Constants:
    """Constants with missing entries at the centre of their prior."""
    return Constants(**{f.name: float(values.get(f.name, PRIORS[f.name].centre)) for f in fields(Constants)})


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """The constants and how far off their predictions were on the runs that they were fitted on."""

    constants: Constants
    band: float
    """Predicted times hold within this factor - 1 for 80 % of runs from sources that the fit had not seen."""
    fitted_on: str


@functools.lru_cache(maxsize=1)
def default_constants() -> FittedConstants:
    """The constants that ship with mdsp."""
    found = json.loads(CONSTANTS_FILE.read_text())
    return FittedConstants(constants_from(found["values"]), float(found["band"]), str(found["fitted_on"]))
