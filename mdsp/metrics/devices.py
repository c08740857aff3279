"""Peak matrix rates of devices, by the name torch gives them. No torch; unknown devices are measured (`gemm.py`).

Dense rates from the makers' data sheets in TFLOP/s (no structured sparsity, 16-bit with 32-bit accumulation). One row
is one *torch device*: an MI250X is two of them, a GB200 superchip is two GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device and its dense peaks in TFLOP/s; a precision that it lacks is absent."""

    name: str
    pattern: str
    """Regular expression, searched for in the device name without regard to case."""
    tflops: dict[Precision, float]
    source: str

    def peak(self, precision: Precision) -> float | None:
        """Peak in FLOP/s."""
        rate = self.tflops.get(precision)
        return None if rate is None else rate * 1e12


def _nvidia(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[Precision, float]:
    rates: dict[Precision, float] = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half}
    if fp8 is not None:
        rates["fp8"] = fp8
    return rates


# The first matching row counts, so the more special name stands first.
DEVICES: tuple[Device, ...] = (
    Device("GB300", r"\bGB300\b", _nvidia(80, 1250, 2500, 5000), "NVIDIA GB300 NVL72 data sheet"),
    Device("GB200", r"\bGB200\b", _nvidia(80, 1250, 2500, 5000), "NVIDIA GB200 NVL72 data sheet"),
    Device("B300", r"\bB300\b", _nvidia(75, 1125, 2250, 4500), "NVIDIA HGX B300 data sheet"),
    Device("B200", r"\bB200\b", _nvidia(75, 1125, 2250, 4500), "NVIDIA HGX B200 data sheet"),
    Device("GH200", r"\bGH200\b", _nvidia(67, 494.5, 989.4, 1978.9), "NVIDIA GH200 data sheet"),
    Device("H200 NVL", r"\bH200 NVL\b", _nvidia(60, 417.5, 835.5, 1670.5), "NVIDIA H200 data sheet"),
    Device("H200", r"\bH200\b", _nvidia(67, 494.5, 989.4, 1978.9), "NVIDIA H200 data sheet"),
    Device("H100 NVL", r"\bH100 NVL\b", _nvidia(60, 417.5, 835.5, 1670.5), "NVIDIA H100 data sheet"),
    Device("H100 PCIe", r"\bH[18]00 PCIe\b", _nvidia(51, 378, 756, 1513), "NVIDIA H100 data sheet"),
    Device("H100 SXM", r"\bH[18]00\b", _nvidia(67, 494.5, 989.4, 1978.9), "NVIDIA H100 data sheet"),
    Device("H20", r"\bH20\b", _nvidia(44, 74, 148, 296), "NVIDIA H20 data sheet"),
    Device("A100", r"\bA[18]00\b", _nvidia(19.5, 156, 312), "NVIDIA A100 data sheet"),
    Device("A40", r"\bA40\b", _nvidia(37.4, 74.8, 149.7), "NVIDIA A40 data sheet"),
    Device("A30", r"\bA30\b", _nvidia(10.3, 82, 165), "NVIDIA A30 data sheet"),
    Device("A10", r"\bA10G?\b", _nvidia(31.2, 62.5, 125), "NVIDIA A10 data sheet"),
    Device("L40S", r"\bL40S\b", _nvidia(91.6, 183, 362, 733), "NVIDIA L40S data sheet"),
    Device("L40", r"\bL40\b", _nvidia(90.5, 90.5, 181, 362), "NVIDIA L40 data sheet"),
    Device("L4", r"\bL4\b", _nvidia(30.3, 60, 121, 242), "NVIDIA L4 data sheet"),
    Device("RTX 5090", r"\bRTX 5090\b", _nvidia(104.8, 104.8, 209.5, 419), "NVIDIA RTX Blackwell whitepaper"),
    Device("RTX 4090", r"\bRTX 4090\b", _nvidia(82.6, 82.6, 165.2, 330.3), "NVIDIA Ada whitepaper"),
    Device("RTX 3090", r"\bRTX 3090\b", _nvidia(35.6, 35.6, 71), "NVIDIA GA102 whitepaper"),
    Device("RTX A6000", r"\bRTX A6000\b", _nvidia(38.7, 77.4, 154.8), "NVIDIA GA102 whitepaper"),
    Device("V100 PCIe", r"\bV100-PCIE", {"fp32": 14.0, "fp16": 112.0}, "NVIDIA V100 data sheet"),
    Device("V100", r"\bV100", {"fp32": 15.7, "fp16": 125.0}, "NVIDIA V100 data sheet"),
    Device("T4", r"\bT4\b", {"fp32": 8.1, "fp16": 65.0}, "NVIDIA T4 data sheet"),
    Device(
        "MI355X",
        r"\bMI355X?\b",
        {"fp32": 157.3, "fp16": 2516.6, "bf16": 2516.6, "fp8": 5033.2},
        "AMD MI355X data sheet",
    ),
    Device(
        "MI325X",
        r"\bMI325X?\b",
        {"fp32": 163.4, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
        "AMD MI325X data sheet",
    ),
    Device(
        "MI300X",
        r"\bMI300X?\b",
        {"fp32": 163.4, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
        "AMD MI300X data sheet",
    ),
    Device(
        "MI250X", r"\bMI250X\b", {"fp32": 47.9, "fp16": 191.5, "bf16": 191.5}, "AMD MI250X data sheet, one of 2 dies"
    ),
    Device("MI250", r"\bMI250\b", {"fp32": 45.3, "fp16": 181.1, "bf16": 181.1}, "AMD MI250 data sheet, one of 2 dies"),
)


def find_device(device_name: str) -> Device | None:
    """The row for a name such as `torch.cuda.get_device_name()` gives ("NVIDIA H100 80GB HBM3"), or None."""
    for device in DEVICES:
        if re.search(device.pattern, device_name, re.IGNORECASE):
            return device
    return None


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """Dense peak of a device in FLOP/s; None when the device, or the precision on it, is not in the table."""
    device = find_device(device_name)
    return None if device is None else device.peak(precision)
