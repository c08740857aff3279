"""The installed DeepSpeed against our picture of its keys."""

from __future__ import annotations

from typing import Any

import pytest

from mdsp.config.deepspeed_schema import (
    Bf16Section,
    FileMonitorSection,
    FlopsProfilerSection,
    Fp16Section,
    RunFile,
    WandbSection,
    ZeroSection,
)
from mdsp.config.load import resolve_run_config
from mdsp.config.refused_keys import REFUSED_KEYS, refusal
from tests.config.files import document


class Recording(dict[str, Any]):
    """A dictionary that remembers which keys it was asked for."""

    def __init__(self, content: dict[str, Any], asked: set[str]) -> None:
        super().__init__(content)
        self.asked = asked

    def __copy__(self) -> Recording:
        return Recording(self, self.asked)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """DeepSpeed asks `name in config.keys()`."""
        return self


def test_every_key_that_deepspeed_reads_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: set[str] = set()
    DeepSpeedConfig(Recording({"train_batch_size": 1}, asked))
    assert {"optimizer", "bf16", "zero_optimization", "pipeline", "wandb"} <= asked
    ours = {*RunFile.model_fields, *REFUSED_KEYS}
    legacy = {"allgather_size"}  # read for zero_optimization: true, the format before stages
    assert asked - ours - legacy == set()


def test_every_key_that_deepspeed_removed_is_refused() -> None:
    from deepspeed.runtime import config

    removed = config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    assert {key for key in removed if refusal(key) is None} == set()
    assert {k for k in config._REMOVED_ZERO_CONFIG_KEYS if refusal(f"zero_optimization.{k}") is None} == set()


def test_sections_have_deepspeeds_fields() -> None:
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name, section, theirs in (
        ("bf16", Bf16Section, DeepSpeedBF16Config),
        ("fp16", Fp16Section, DeepSpeedFP16Config),
        ("wandb", WandbSection, WandbConfig),
        ("tensorboard", FileMonitorSection, TensorBoardConfig),
        ("csv_monitor", FileMonitorSection, CSVConfig),
        ("zero_optimization", ZeroSection, DeepSpeedZeroConfig),
    ):
        fields = {*theirs.model_fields, *(f.alias for f in theirs.model_fields.values() if f.alias)}
        assert set(section.model_fields) - fields == set(), name
        unknown = {f for f in fields - set(section.model_fields) if refusal(f"{name}.{f}") is None}
        assert unknown == set(), name


def test_flops_profiler_fields() -> None:
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig

    assert set(FlopsProfilerSection.model_fields) == set(vars(DeepSpeedFlopsProfilerConfig({})))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deepspeed_accepts_and_reads_what_is_filled_in(precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    values = document()
    values["mdsp"]["parallel"] = {"sequence_parallel": True}
    if precision != "fp32":
        values[precision] = {"enabled": True}
    values["csv_monitor"] = {"enabled": True, "output_path": "x", "job_name": None}
    resolved = resolve_run_config(values, 1).deepspeed
    # Without a process group DeepSpeed takes the world to be one rank.
    theirs = DeepSpeedConfig(resolved)
    assert (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu) == (8, 2)
    assert theirs.gradient_accumulation_steps == 4
    assert theirs.zero_optimization_stage == 1
    assert theirs.gradient_clipping == 1.0
    assert theirs.optimizer_name == "adamw"
    assert theirs.bfloat16_config.enabled == (precision == "bf16")
    assert theirs.float16_config.enabled == (precision == "fp16")
    assert theirs.grad_accum_dtype == ("fp32" if precision == "bf16" else None)
    assert theirs.pipeline["use_reentrant"] is False
    assert theirs.pipeline["pipe_partitioned"] is False
    assert theirs.pipeline["grad_partitioned"] is False
    assert theirs.monitor_config.csv_monitor.enabled


def test_gradient_clipping_default_is_deepspeeds() -> None:
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    assert RunFile.model_fields["gradient_clipping"].default == GRADIENT_CLIPPING_DEFAULT
