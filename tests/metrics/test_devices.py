"""Device names as torch prints them find the right row; the measured peak is a plausible rate."""

from __future__ import annotations

import pytest
import torch

from mdsp.metrics.devices import find_device, peak_flops_per_s
from mdsp.metrics.gemm import measure_gemm_peak


@pytest.mark.parametrize(
    ("name", "row", "bf16_tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 312),
        ("NVIDIA A100 80GB PCIe", "A100", 312),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5),
        ("NVIDIA H200", "H200", 989.4),
        ("NVIDIA GH200 480GB", "GH200", 989.4),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA GB200", "GB200", 2500),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
        ("AMD Instinct MI250X", "MI250X", 191.5),
        ("NVIDIA A10G", "A10", 125),
        ("NVIDIA L40S", "L40S", 362),
        ("NVIDIA L4", "L4", 121),
    ],
)
def test_known_names(name: str, row: str, bf16_tflops: float) -> None:
    device = find_device(name)
    assert device is not None
    assert device.name == row
    assert peak_flops_per_s(name, "bf16") == bf16_tflops * 1e12


def test_what_is_not_known_is_none() -> None:
    assert find_device("AMD EPYC 7763 64-Core Processor") is None
    assert peak_flops_per_s("cpu", "fp32") is None
    assert peak_flops_per_s("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops_per_s("Tesla V100-SXM2-32GB", "bf16") is None


def test_measured_peak_is_a_rate() -> None:
    rate = measure_gemm_peak(torch.device("cpu"), torch.float32, size=256, seconds=0.05)
    assert 1e8 < rate < 1e14
