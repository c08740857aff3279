"""Learning-rate schedules against those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from mdsp.config.schema import ScheduleConfig
from mdsp.learning_rate import learning_rate_factor


def reference(kind: str, warmup: int, total: int, decay: int, min_ratio: float) -> list[float]:
    """Factors of the schedule of transformers after 0 ... total steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "constant":
        scheduler = get_constant_schedule_with_warmup(optimizer, warmup)
    elif kind == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, total)
    elif kind == "cosine":
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr_rate=min_ratio)
    else:
        scheduler = get_wsd_schedule(
            optimizer,
            num_warmup_steps=warmup,
            num_stable_steps=total - warmup - decay,
            num_decay_steps=decay,
            decay_type="linear",
            min_lr_ratio=min_ratio,
        )
    factors = []
    for _ in range(total + 1):
        factors.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("warmup", [1, 7])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_factors_are_those_of_transformers(kind: str, warmup: int) -> None:
    total, decay = 50, 10
    # In transformers, linear always ends at 0, and wsd also begins its warm-up at min_ratio.
    min_ratio = 0.1 if kind == "cosine" else 0.0
    schedule = ScheduleConfig(kind=kind, warmup=warmup, decay=decay if kind == "wsd" else None, min_ratio=min_ratio)
    expected = reference(kind, warmup, total, decay, min_ratio)
    # transformers gives step n (from 0) the factor at n, so its first step does nothing; ours has the factor at n + 1.
    for at in range(1, total + 1):
        assert learning_rate_factor(schedule, at, total) == pytest.approx(expected[at], abs=1e-12)


def test_without_warmup_the_first_step_is_near_the_peak() -> None:
    assert learning_rate_factor(ScheduleConfig(kind="linear", min_ratio=0.0), 1, 4) == 0.75


def test_after_the_end_the_rate_stays_at_its_minimum() -> None:
    for kind in ("linear", "cosine", "wsd"):
        schedule = ScheduleConfig(kind=kind, total=10, min_ratio=0.25)
        assert learning_rate_factor(schedule, 500, 1000) == pytest.approx(0.25)


def test_tokens_count_like_steps() -> None:
    """A schedule over tokens is the one over steps when every step has as many tokens."""
    per_step = 4096
    by_steps = ScheduleConfig(warmup=10, total=100)
    by_tokens = ScheduleConfig(unit="tokens", warmup=10 * per_step, total=100 * per_step)
    for step in (1, 9, 10, 11, 57, 100):
        expected = learning_rate_factor(by_steps, step, 100)
        assert learning_rate_factor(by_tokens, step * per_step, 100 * per_step) == pytest.approx(expected)
