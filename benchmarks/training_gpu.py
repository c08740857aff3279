"""Training speed on one GPU in bf16: mdsp through the DeepSpeed engine against `transformers` loops, in turns.

    python benchmarks/training_gpu.py [--rounds 10] [--model gpt2-124m|llama-1b]

All contestants live in this process and take one optimizer step each, in turn; ratios are taken within a round, and
their median is reported. Every contestant has its attention from torch's scaled_dot_product_attention, its AdamW from
torch (fused), and clips gradients. What differs is how bf16 is done:

    transformers, autocast      fp32 weights and gradients, matrix products in bf16: the usual loop
    transformers, bf16 weights  no fp32 copy anywhere; faster, and small updates are lost in rounding
    mdsp                        bf16 weights, fp32 master weights and gradient sums (DeepSpeed's BF16_Optimizer)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import transformers
from rich.console import Console
from rich.table import Table

from mdsp.config.load import resolve_run_config
from mdsp.engine.build import build_engine
from mdsp.engine.distributed import join_job, leave_job
from mdsp.metrics.device_timeline import timeline_recorder
from mdsp.metrics.devices import peak_flops_per_s
from mdsp.metrics.flops import model_flops
from mdsp.metrics.gemm import measure_gemm_peak
from mdsp.model.config import ModelConfig
from mdsp.rank_output import Place

LEARNING_RATE = 1e-4
DEVICE = torch.device("cuda", 0)
NO_DROPOUT: dict[str, Any] = dict(embedding_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0)
Step = Callable[[], None]


class Setting:
    """A model, as both sides call it, and its batch."""

    def __init__(self, name: str) -> None:
        if name == "gpt2-124m":
            self.seq, self.micro_batch, self.micro_batches = 1024, 16, 8
            self.model = ModelConfig(
                family="gpt2", n_layers=12, hidden_size=768, n_heads=12, vocab_size=50257, max_positions=1024,
                **NO_DROPOUT,
            )  # fmt: skip
            self.hf: transformers.PretrainedConfig = transformers.GPT2Config(
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
            )
        else:
            self.seq, self.micro_batch, self.micro_batches = 2048, 4, 8
            self.model = ModelConfig(
                family="llama", n_layers=16, hidden_size=2048, n_heads=32, n_kv_heads=8, ffn_size=8192,
                vocab_size=32000, max_positions=2048, norm="rmsnorm", position="rotary", activation="silu",
                gated_mlp=True, qkv_bias=False, attention_output_bias=False, mlp_bias=False, tied_head=False,
                **NO_DROPOUT,
            )  # fmt: skip
            self.hf = transformers.LlamaConfig(
                num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8,
                intermediate_size=8192, vocab_size=32000, max_position_embeddings=2048, use_cache=False,
            )  # fmt: skip

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Random tokens and labels in micro-batches."""
        shape = (self.micro_batches, self.micro_batch, self.seq + 1)
        ids = torch.randint(0, self.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]


def transformers_step(setting: Setting, autocast: bool) -> Step:
    """The usual training loop."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(setting.hf, dtype=dtype, attn_implementation="sdpa")
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    data = setting.batches()

    def step() -> None:
        for tokens, _ in data:
            ids = tokens.to(DEVICE)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss / len(data)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def mdsp_step(setting: Setting) -> tuple[Step, Any]:
    """mdsp through the engine; (step, engine)."""
    document = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": setting.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "mdsp": {"model": setting.model.model_dump(), "data": {"seq_length": setting.seq}},
    }
    engine = build_engine(resolve_run_config(document, 1))
    data = setting.batches()
    weights = torch.full((setting.micro_batch, setting.seq), 1.0 / (setting.micro_batch * setting.seq))

    def step() -> None:
        engine.train_batch(iter([(tokens, (labels, weights)) for tokens, labels in data]))

    return step, engine


def seconds_of(step: Step) -> float:
    """Wall time until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="optimizer steps of each contestant that count")
    parser.add_argument("--model", choices=("gpt2-124m", "llama-1b"), default="gpt2-124m")
    arguments = parser.parse_args()
    deepspeed.utils.logger.setLevel("ERROR")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    join_job(Place(0, 1, 0, 1), timeout_s=600)
    setting = Setting(arguments.model)
    step, engine = mdsp_step(setting)
    recorder = timeline_recorder(0, 0, DEVICE)

    def recorded() -> None:
        recorder.begin_step()
        engine.recorder = recorder
        step()
        recorder.end_step()
        engine.recorder = None

    contestants: dict[str, Step] = {
        "transformers, autocast": transformers_step(setting, autocast=True),
        "transformers, bf16 weights": transformers_step(setting, autocast=False),
        "mdsp": step,
        "mdsp, timeline recorded": recorded,
    }
    for one in contestants.values():
        for _ in range(2):
            one()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, one in contestants.items():
            seconds[name].append(seconds_of(one))

    name = torch.cuda.get_device_name(DEVICE)
    peak = peak_flops_per_s(name, "bf16")
    gemm = measure_gemm_peak(DEVICE, torch.bfloat16)
    tokens = setting.micro_batch * setting.micro_batches * setting.seq
    flops = setting.micro_batch * setting.micro_batches * model_flops(setting.model, setting.seq)
    known = f"{peak / 1e12:.0f}" if peak else "unknown"
    table = Table(title=f"{arguments.model}, {name}: peak {known}, measured GEMM {gemm / 1e12:.0f} TFLOP/s")
    for heading in ("contestant", "tokens/s", "model TFLOP/s", "MFU", "to autocast"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for contestant, times in seconds.items():
        middle = statistics.median(times)
        pairs = zip(seconds["transformers, autocast"], times, strict=True)
        table.add_row(
            contestant,
            f"{tokens / middle:.0f}",
            f"{flops / middle / 1e12:.0f}",
            f"{100 * flops / middle / peak:.1f} %" if peak else "",
            f"{statistics.median(a / b for a, b in pairs):.2f}",
        )
    console = Console(width=120)
    console.print(table)
    pairs = zip(seconds["mdsp, timeline recorded"], seconds["mdsp"], strict=True)
    console.print(f"recording the timeline costs {100 * (statistics.median(a / b for a, b in pairs) - 1):.2f} %")
    leave_job()


if __name__ == "__main__":
    main()
