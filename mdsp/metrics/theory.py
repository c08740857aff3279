"""What the literature says about a schedule's bubble, from the numbers of stages and micro-batches alone. No torch."""

from __future__ import annotations

from typing import Literal

from mdsp.errors import ConfigError

Schedule = Literal["1f1b", "gpipe", "zb-h1", "interleaved"]


def fill_factor(schedule: Schedule, chunks: int = 1) -> float:
    """Share of one micro-batch's time per other stage that a stage idles while the pipeline fills and drains.

    1F1B and GPipe: 1 (Narayanan et al. 2021, section 2.2). Interleaved, `chunks` model chunks per stage: 1 / chunks.
    ZB-H1: 1/3, when forward, backward and weight passes take equal times (Qi et al. 2023, table 1: T_F + T_B - T_W).
    """
    if schedule == "zb-h1":
        return 1 / 3
    return 1 / chunks if schedule == "interleaved" else 1.0


def theoretical_bubble(stages: int, micro_batches: int, schedule: Schedule = "1f1b", chunks: int = 1) -> float:
    """Idle share of the pipeline in 0..1: `f (P - 1) / (M + f (P - 1))` with `f` the fill factor.

    For 1F1B this is (P - 1) / (M + P - 1): 48.4 % for 16 stages and 16 micro-batches, 10.5 % for 128.
    """
    if stages < 1 or micro_batches < 1 or chunks < 1:
        raise ConfigError(
            f"a pipeline of {stages} stages, {micro_batches} micro-batches and {chunks} chunks does not exist; "
            f"each must be at least 1"
        )
    fill = fill_factor(schedule, chunks) * (stages - 1)
    return fill / (micro_batches + fill)
