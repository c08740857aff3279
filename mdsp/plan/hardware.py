"""Devices, nodes and clusters: datasheet numbers only. What software makes of them is in `constants.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mdsp.config.problems import MOST_RANKS
from mdsp.config.read import parse_json
from mdsp.errors import ConfigError
from mdsp.metrics.devices import find_device

Architecture = Literal["volta", "ampere", "hopper", "blackwell", "cdna", "other"]

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as its datasheet describes it (dense rates, without structured sparsity)."""

    name: str
    architecture: Architecture
    memory_bytes: float
    """Capacity as sold, in bytes (80e9 for "80 GB")."""
    hbm_bytes_per_s: float
    """Peak memory bandwidth."""
    half_flops: float
    """Peak fp16 / bf16 matrix rate, FLOP/s."""
    fp8_flops: float
    """Peak fp8 matrix rate; equal to `half_flops` where the device has none."""
    fp32_flops: float
    """Peak fp32 rate (TF32 where the device has it)."""
    link_bytes_per_s: float
    """Bandwidth to the other devices of its node, one direction (NVLink, Infinity Fabric, PCIe)."""
    network_bytes_per_s: float
    """Its share of the node's network, one direction (InfiniBand, RoCE)."""
    devices_per_node: int = 8
    """Devices that a usual node has."""
    link_domain: int = 0
    """Devices that reach each other over the link; 0 means the node. 72 for an NVL72 rack."""
    host_bytes: float = 0.0
    """Memory of a processor on the same package, reached at link speed (Grace): activations can be kept there."""
    power: float = 1.0
    """Board power over the power of the full version: a limited board runs its matrix units slower in proportion."""


def _gpu(name: str, arch: Architecture, gb: float, hbm: float, link: float, network_gbit: float, per_node: int = 8,
         domain: int = 0, power: float = 1.0) -> Device:  # fmt: skip
    """Datasheet units in (GB, TB/s, GB/s, Gbit/s), SI units out; matrix rates from `mdsp.metrics.devices`."""
    rates = find_device(name)
    assert rates is not None, name
    half = rates.tflops["fp16"] * TERA
    fp32 = rates.tflops.get("tf32", rates.tflops["fp32"]) * TERA
    host = 240 * GIGA if name.startswith("G") else 0.0
    return Device(name, arch, gb * GIGA, hbm * TERA, half, rates.tflops.get("fp8", half / TERA) * TERA, fp32,
                  link * GIGA, network_gbit * GIGA / 8, per_node, domain, host, power)  # fmt: skip


# Sources: the vendors' datasheets; link is one direction, network the usual fabric of the vendor's own 8-GPU system.
_DEVICES = [
    #    name           arch         GB   TB/s   link  Gbit/s
    _gpu("V100-16GB",   "volta",     16,  0.90,  150,  50),
    _gpu("V100",        "volta",     32,  0.98,  150,  50),
    _gpu("A100-40GB",   "ampere",    40,  1.555, 300,  200),
    _gpu("A100",        "ampere",    80,  2.039, 300,  200),
    _gpu("A100-PCIe",   "ampere",    80,  1.935, 32,   200, power=0.75),
    _gpu("A800",        "ampere",    80,  2.039, 200,  200),
    _gpu("H100",        "hopper",    80,  3.35,  450,  400),
    _gpu("H100 PCIe",   "hopper",    80,  2.0,   64,   200, power=0.75),
    _gpu("H100-96GB",   "hopper",    96,  2.4,   450,  400, power=500 / 700),
    _gpu("H800",        "hopper",    80,  3.35,  200,  400),
    _gpu("H20",         "hopper",    96,  4.0,   450,  400),
    _gpu("H200",        "hopper",    141, 4.8,   450,  400),
    _gpu("GH200",       "hopper",    96,  4.0,   450,  200, per_node=4),
    _gpu("B200",        "blackwell", 180, 8.0,   900,  400),
    _gpu("GB200",       "blackwell", 186, 8.0,   900,  400, per_node=4, domain=72),
    _gpu("B300",        "blackwell", 288, 8.0,   900,  800),
    _gpu("GB300",       "blackwell", 278, 8.0,   900,  800, per_node=4, domain=72),
    _gpu("MI250X",      "cdna",      64,  1.6,   100,  100),
    _gpu("MI300X",      "cdna",      192, 5.3,   448,  400),
    _gpu("MI325X",      "cdna",      256, 6.0,   448,  400),
    _gpu("L40S",        "other",     48,  0.864, 32,   200),
]  # fmt: skip
DEVICES: dict[str, Device] = {d.name: d for d in _DEVICES}
_ALIASES = {
    "V100-32GB": "V100", "A100-80GB": "A100", "A100-SXM": "A100", "A100-SXM4": "A100", "A100-SXM4-80GB": "A100",
    "A100-SXM4-40GB": "A100-40GB", "H100-SXM": "H100", "H100-SXM5": "H100", "H100-80GB": "H100",
    "H200-SXM": "H200", "B200-SXM": "B200", "H100-PCIE": "H100 PCIe", "V100-SXM2": "V100", "V100-SXM3": "V100",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        """Refuse what would keep the search busy for ever."""
        if self.devices > MOST_RANKS:
            raise ConfigError(f"a cluster of {self.devices} devices; at most {MOST_RANKS:,} can be planned")

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def link_domain(self) -> int:
        """Devices that reach each other without the network."""
        return max(self.device.link_domain, self.devices_per_node)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices_per_node} x {self.device.name}"


def device_named(name: str) -> Device:
    """The device of that name, in any case; raises `ConfigError` listing the known ones."""
    upper = name.upper()
    for known, device in DEVICES.items():
        if known.upper() == upper:
            return device
    if upper in _ALIASES:
        return DEVICES[_ALIASES[upper]]
    raise ConfigError(
        f"unknown device {name!r}; known: {', '.join(DEVICES)}; or give a JSON file with the fields of a device"
    )


def parse_cluster(text: str) -> Cluster:
    """A cluster from `NODESxPER_NODExDEVICE` (`128x8xH100`), `DEVICESxDEVICE` (`16xA100`), or a JSON file.

    The file holds {"nodes", "devices_per_node", "device": name or an object}; the object may have "base": a known
    name, and any of `memory_gb`, `hbm_tb_per_s`, `half_tflops`, `fp8_tflops`, `fp32_tflops`, `link_gb_per_s`,
    `network_gbit_per_s`, `link_domain`. Raises `ConfigError`.
    """
    if text.endswith(".json"):
        return _cluster_from_json(Path(text))
    match = re.fullmatch(r"(\d+)[x*](?:(\d+)[x*])?([A-Za-z][\w.-]*)", text.strip())
    if match is None:
        raise ConfigError(
            f"--cluster {text!r} is not understood; write NODESxDEVICES_PER_NODExDEVICE, for example 128x8xH100, or "
            f"the name of a .json file"
        )
    device = device_named(match[3])
    if match[2] is None:
        total = int(match[1])
        per_node = min(total, device.devices_per_node)
        if per_node and total % per_node:
            raise ConfigError(
                f"--cluster {text!r}: {total} devices are not whole nodes of {per_node}; write NODESxDEVICES_PER_NODEx"
                f"{device.name}"
            )
        nodes = total // per_node if per_node else 0
    else:
        nodes, per_node = int(match[1]), int(match[2])
    if nodes < 1 or per_node < 1:
        raise ConfigError(f"--cluster {text!r} has no devices; nodes and devices per node must be at least 1")
    return Cluster(device, nodes, per_node)


_JSON_FIELDS = {
    "memory_gb": ("memory_bytes", GIGA),
    "hbm_tb_per_s": ("hbm_bytes_per_s", TERA),
    "half_tflops": ("half_flops", TERA),
    "fp8_tflops": ("fp8_flops", TERA),
    "fp32_tflops": ("fp32_flops", TERA),
    "link_gb_per_s": ("link_bytes_per_s", GIGA),
    "network_gbit_per_s": ("network_bytes_per_s", GIGA / 8),
}


def _cluster_from_json(path: Path) -> Cluster:
    try:
        found = parse_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--cluster {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"--cluster {path}: not JSON ({error})") from None
    if not isinstance(found, dict) or not {"nodes", "devices_per_node", "device"} == set(found):
        raise ConfigError(f'--cluster {path}: needs exactly the keys "nodes", "devices_per_node" and "device"')
    nodes, per_node = found["nodes"], found["devices_per_node"]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (nodes, per_node)):
        raise ConfigError(f"--cluster {path}: nodes and devices_per_node must be whole numbers above 0")
    return Cluster(_device_from_json(path, found["device"]), nodes, per_node)


def _device_from_json(path: Path, value: Any) -> Device:
    if isinstance(value, str):
        return device_named(value)
    if not isinstance(value, dict):
        raise ConfigError(f"--cluster {path}: device must be a name or an object")
    values = dict(value)
    base = device_named(values.pop("base", "A100"))
    changes: dict[str, Any] = {"name": str(values.pop("name", base.name + "*")), "architecture": base.architecture}
    if "base" not in value:
        missing = [key for key in _JSON_FIELDS if key not in values and key not in ("fp8_tflops", "fp32_tflops")]
        if missing:
            raise ConfigError(f'--cluster {path}: device has no "base", so it also needs {", ".join(missing)}')
        changes["architecture"] = "other"
        values.setdefault("fp8_tflops", values["half_tflops"])
        values.setdefault("fp32_tflops", values["half_tflops"])
    if "link_domain" in values:
        changes["link_domain"] = domain = values.pop("link_domain")
        if not isinstance(domain, int) or isinstance(domain, bool) or domain < 1:
            raise ConfigError(
                f"--cluster {path}: device field link_domain is {domain!r}; it must be a number of devices"
            )
    for key, number in values.items():
        if key not in _JSON_FIELDS:
            raise ConfigError(
                f"--cluster {path}: unknown device field {key!r}; known: base, name, link_domain, "
                f"{', '.join(_JSON_FIELDS)}"
            )
        if not isinstance(number, int | float) or isinstance(number, bool) or number <= 0:
            raise ConfigError(f"--cluster {path}: device field {key} is {number!r}; it must be a number above 0")
        field, unit = _JSON_FIELDS[key]
        changes[field] = number * unit
    return replace(base, **changes)


def run_cluster(device_name: str, peak_flops: float, devices: int, devices_per_node: int = 0) -> Cluster:
    """The cluster of a run from what it knows of itself: the device's name as torch gives it, and its matrix rate.

    A device that is not in the table (a processor) gets the measured rate and typical ratios of memory and link to it.
    """
    found = find_device(device_name)
    known = DEVICES.get(found.name) or DEVICES.get(found.name.split()[0]) if found is not None else None
    if known is None:
        known = Device(
            "cpu" if "measured" in device_name else device_name, "other", memory_bytes=1e15,
            hbm_bytes_per_s=peak_flops / 10, half_flops=peak_flops,
            fp8_flops=peak_flops, fp32_flops=peak_flops, link_bytes_per_s=peak_flops / 50,
            network_bytes_per_s=peak_flops / 500, devices_per_node=devices,
        )  # fmt: skip
    per_node = min(devices, devices_per_node or known.devices_per_node)
    return Cluster(known, max(1, -(-devices // per_node)), per_node)
