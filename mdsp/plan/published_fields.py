"""The fields of a published run's row: model, devices, program, precision, schedule, each in the planner's terms."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from mdsp.model.config import ModelConfig
from mdsp.plan.hardware import DEVICES, GIGA, Cluster, Device
from mdsp.plan.layout import Precision, Recompute, Schedule, Software

MEGATRON_2019 = Software("Megatron-LM until 2022", flash=False)
MEGATRON_DEEPSPEED = Software("Megatron-DeepSpeed", flash=False, deepspeed=True, gradient_bytes=2)
MEGATRON_CORE = Software(
    "Megatron-core, NeMo",
    overlap_tensor=True,
    overlap_data=True,
    gradient_bytes=2,
    reduce_bytes=2,
    fp8_activations=True,
)
ZERO3_2021 = Software("DeepSpeed ZeRO-3, 2021", False, overlap_data=True, per_parameter_gather=True, reduce_bytes=2)
FSDP = Software("FSDP, eager", eager=True, overlap_data=True)
FSDP_COMPILED = Software("FSDP, torch.compile", overlap_data=True)


class Skip(Exception):
    """Why a row cannot be predicted."""


def read_number(section: dict[str, Any], key: str) -> float | None:
    """A positive number, or None for anything else."""
    value = section.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)


def read_count(section: dict[str, Any], key: str) -> int | None:
    """A positive whole number, or None for anything else."""
    value = read_number(section, key)
    return None if value is None else round(value)


def joined(*parts: Any) -> str:
    """What is given of the parts, in lower case, to search for words in."""
    return " ".join(str(part) for part in parts if part).lower()


def _year(row: dict[str, Any]) -> int | None:
    years = [
        int(y) for y in re.findall(r"\b(20[12]\d)\b", joined(row["source"].get("paper"), row["source"].get("table")))
    ]
    return min(years) if years else None


def model_of(row: dict[str, Any], assumed: list[str]) -> ModelConfig:
    """The model's shape; positions, norms and biases follow from the MLP kind (they hardly matter for time)."""
    model = row["model"]
    if read_count(model, "n_experts") or read_count(model, "top_k"):
        raise Skip("mixture of experts is beyond the model")
    hidden, heads = read_count(model, "hidden"), read_count(model, "heads")
    if hidden is None or heads is None:
        raise Skip("hidden size or heads are not given")
    ffn_type = joined(model.get("ffn_type"))
    gated = "glu" in ffn_type or "gated" in ffn_type
    vocab = read_count(model, "vocab")
    if vocab is None:
        approximate = read_number(row.get("extra") or {}, "vocab_approx")
        vocab = 51200 if approximate is None else 250880 if approximate == 250000 else round(approximate)
        assumed.append(f"vocabulary {vocab}")
    ffn = read_count(model, "ffn")
    if ffn is None:
        ffn = 4 * hidden
        assumed.append(f"ffn {ffn}")
    kv_heads = read_count(model, "kv_heads") or heads
    layers = read_count(model, "layers")
    if layers is None:
        billions = read_number(model, "params_b")
        if billions is None:
            raise Skip("neither layers nor parameters are given")
        head_dim = hidden // heads
        block = hidden * head_dim * 2 * (heads + kv_heads) + hidden * ffn * (3 if gated else 2)
        layers = max(1, round((billions * 1e9 - vocab * hidden * (2 if gated else 1)) / block))
        assumed.append(f"{layers} layers, from {billions:g}B parameters")
    if hidden % heads and not read_count(model, "head_dim"):
        raise Skip(f"hidden {hidden} is not a multiple of {heads} heads and no head dimension is given")
    llama = gated or "squared" in ffn_type
    dropout = 0.0 if llama else 0.1
    try:
        return ModelConfig(
            n_layers=layers, hidden_size=hidden, n_heads=heads, n_kv_heads=kv_heads, ffn_size=ffn, vocab_size=vocab,
            head_dim=read_count(model, "head_dim") or 0, max_positions=read_count(model, "seq") or 1024,
            gated_mlp=gated,
            activation="silu" if gated else "relu" if "relu" in ffn_type else "gelu_tanh",
            norm="rmsnorm" if gated else "layernorm", position="rotary" if llama else "learned", qkv_bias=not llama,
            attention_output_bias=not llama, mlp_bias=not llama, tied_head=not llama,
            hidden_dropout=dropout, attention_dropout=dropout, embedding_dropout=dropout,
        )  # fmt: skip
    except ValueError as error:
        raise Skip(f"the model's shape is contradictory: {str(error).splitlines()[-1].strip()}") from None


_GPU_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"gb300", "GB300"), (r"b300", "B300"), (r"gb200", "GB200"), (r"b200", "B200"), (r"gh200", "GH200"),
    (r"h200", "H200"),
    (r"h20\b", "H20"), (r"h800", "H800"), (r"h100.*(hbm2e|96 ?gb|94|95 ?gb|500 ?w)", "H100-96GB"),
    (r"h100.*pcie", "H100 PCIe"),
    (r"h100", "H100"), (r"a800", "A800"), (r"a100.*pcie", "A100-PCIe"), (r"a100.*40", "A100-40GB"), (r"a100", "A100"),
    (r"v100.*16 ?gb", "V100-16GB"), (r"v100", "V100"), (r"mi325", "MI325X"), (r"mi300", "MI300X"), (r"mi250", "MI250X"),
    (r"l40s", "L40S"),
)  # fmt: skip


def cluster_of(row: dict[str, Any], assumed: list[str]) -> Cluster:
    hardware = row["hardware"]
    name, count = joined(hardware.get("gpu")), read_count(hardware, "gpus")
    if count is None:
        raise Skip("the number of devices is not given")
    known = next((known for pattern, known in _GPU_PATTERNS if re.search(pattern, name)), None)
    if known is None:
        raise Skip(f"unknown device {hardware.get('gpu')!r}")
    device = DEVICES[known]
    if "40 or" in name:
        device = DEVICES["A100"]
        assumed.append("A100 of 80 GB")
    memory = read_number(hardware, "mem_gb")
    if memory is not None:
        device = replace(device, memory_bytes=memory * GIGA)
    per_node = read_count(hardware, "gpus_per_node") or device.devices_per_node
    device = _network(device, joined(hardware.get("interconnect")), per_node)
    per_node = next(size for size in range(min(per_node, count), 0, -1) if count % size == 0)
    return Cluster(device, max(1, count // per_node), per_node)


def _network(device: Device, text: str, per_node: int) -> Device:
    """The rates that the row's description of the fabric says."""
    if links := re.search(r"nvlink \((\d+) links\)", text):
        # 25 GB/s per link and direction from Volta to Hopper; a full A100 has 12
        device = replace(device, link_bytes_per_s=min(device.link_bytes_per_s, int(links[1]) * 25 * GIGA))
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*gb/s", text):
        rate = int(found[1]) * int(found[2]) / per_node
    elif found := re.search(r"(\d+)\s*gb/s[^;]*per (?:gpu|device)", text):
        rate = float(found[1])
    elif found := re.search(r"(\d+)\s*gb/s[^;]*(?:node|roce)", text):
        rate = int(found[1]) / per_node
    elif found := re.search(r"(\d+) omnipath", text):
        rate = int(found[1]) * 100 / per_node
    else:
        return device
    return replace(device, network_bytes_per_s=rate * GIGA / 8)


def software_of(row: dict[str, Any], cluster: Cluster) -> Software:
    """Which training program it was, from the source's own words."""
    text = joined(row["source"].get("paper"), row["source"].get("url"), row["source"].get("table"))
    layout = row["layout"]
    flags, schedule = joined(layout.get("flags")), joined(layout.get("schedule"))
    year = _year(row)
    if "compile" in flags:
        software = FSDP_COMPILED
    elif "torchtitan" in text or "mosaic" in text or "fsdp full" in flags or "llm-foundry" in text:
        software = FSDP
    elif layout.get("zero") == 3 and year is not None and year <= 2022:
        software = ZERO3_2021
    elif any(word in text + schedule for word in ("deepspeed", "bigscience", "bloom", "mt-nlg", "neox", "turing")):
        software = MEGATRON_DEEPSPEED
    elif any(word in text for word in ("nemo framework", "dgx cloud", "bridge", "llama 3", "h100", "dgxc")):
        software = MEGATRON_CORE
    elif (year is not None and year <= 2022) or "zero bubble" in text or cluster.device.architecture == "volta":
        software = MEGATRON_2019
    elif "nanotron" in text or "playbook" in text:
        software = Software("nanotron", eager=True, overlap_data=True)
    else:
        software = MEGATRON_CORE if cluster.device.architecture not in ("ampere", "volta") else MEGATRON_2019
    if "flash" in flags and "no flash" not in flags:
        software = replace(software, flash=True)
    if "async tp" in flags:
        software = replace(software, overlap_tensor=True)
    if software is MEGATRON_2019 and layout.get("pp") == 1:
        # Without a pipeline the gradients of these versions were reduced by torch's DDP, bucket by bucket.
        software = replace(software, overlap_data=True)
    if "mode pure" in flags:
        software = replace(software, gradient_bytes=2, reduce_bytes=2)
    if software.deepspeed and "bf16" in joined(layout.get("precision")):
        software = replace(software, gradient_bytes=6)  # its bf16 optimizer keeps both
    return software


def precision_of(row: dict[str, Any]) -> Precision:
    text = joined(row["layout"].get("precision"))
    if "fp8" in text:
        # Row-wise scaling costs what fp8 gains: the source calls it a slow path.
        return "bf16" if "row" in text else "fp8"
    if "fp32" in text or "tf32" in text:
        return "fp32"
    return "bf16" if "bf16" in text else "fp16"


def schedule_of(row: dict[str, Any]) -> Schedule:
    text = joined(row["layout"].get("schedule"))
    if "zb-2p" in text or "zb-h2" in text:
        return "zb2"
    if "zb-v" in text or "zbv" in text or "dualpipe" in text:
        return "zbv"
    if "zb" in text or "zero bubble" in text:
        return "zb1"
    return "gpipe" if "gpipe" in text or "afab" in text else "1f1b"


def recompute_of(row: dict[str, Any]) -> Recompute | None:
    """What is recomputed: as the row says, or as its FLOP convention implies; None where neither does."""
    said = joined(row["layout"].get("recompute"))
    torchtitan = "torchtitan" in joined(row["source"].get("paper"))
    if "(layer)" in said:
        return "half"
    if "selective" in said:
        return "matmul" if torchtitan or "(op)" in said else "selective"
    if "full" in said or said in ("yes", "true"):
        return "full"
    if "none" in said or said in ("no", "false"):
        return "none"
    convention = joined(row.get("flops_convention"))
    if "narayanan_96" in convention or "full-recompute" in convention:
        return "full"
    return "matmul" if torchtitan else None  # its default
