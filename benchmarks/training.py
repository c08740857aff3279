"""Training speed on two CPU cores: mdsp through the DeepSpeed engine against `transformers`, and two ranks against one.

    python benchmarks/training.py [--rounds 5]

All contestants live at the same time and take turns, one optimizer step each, so that a machine whose speed drifts
slows all of them; ratios are taken within a round, and their median is reported. GPT-2 shape: 8 blocks x 512, 8 heads,
sequence 256, vocabulary 8192, fp32, AdamW, gradients clipped, 32 sequences per step in micro-batches of 4.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a thread pool would not survive the fork

import deepspeed
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table

from mdsp.config.load import resolve_run_config
from mdsp.engine.build import build_engine
from mdsp.engine.distributed import join_job
from mdsp.metrics.flops import model_flops
from mdsp.metrics.gemm import measure_gemm_peak
from mdsp.metrics.theory import theoretical_bubble
from mdsp.model.config import ModelConfig
from mdsp.model.layers import SingleProcessGPT
from mdsp.model.layers import token_losses as token_losses_of
from mdsp.rank_output import Place

BLOCKS, HIDDEN, HEADS, SEQ, VOCAB = 8, 512, 8, 256, 8192
MICRO_BATCH, SEQUENCES, LEARNING_RATE = 4, 32, 1e-4
CORES = 2
MODEL = ModelConfig(
    n_layers=BLOCKS, hidden_size=HIDDEN, n_heads=HEADS, vocab_size=VOCAB, max_positions=SEQ, family="gpt2"
)
# Contestant -> (tensor, pipeline, data); None: no engine.
CONTESTANTS: dict[str, tuple[int, int, int] | None] = {
    "transformers": None,
    "mdsp layers, no engine": None,
    "mdsp": (1, 1, 1),
    "mdsp TP2": (2, 1, 1),
    "mdsp PP2": (1, 2, 1),
    "mdsp DP2": (1, 1, 2),
}

Step = Callable[[], None]


def batches(sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens and labels in micro-batches."""
    ids = torch.randint(
        0, VOCAB, (sequences // MICRO_BATCH, MICRO_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0)
    )
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]


def transformers_step() -> Step:
    """The usual training loop around `GPT2LMHeadModel`."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=HIDDEN, n_layer=BLOCKS, n_head=HEADS, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data = batches(SEQUENCES)

    def step() -> None:
        for tokens, _ in data:
            (model(input_ids=tokens, labels=tokens).loss / len(data)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def layers_step() -> Step:
    """mdsp's layers in a hand-written loop: what the engine adds is the difference to this."""
    model = SingleProcessGPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    data = batches(SEQUENCES)

    def step() -> None:
        for tokens, labels in data:
            losses = token_losses_of(model.sequence_first_logits(tokens), labels, model.context)
            (losses.mean() / len(data)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(layout: tuple[int, int, int]) -> Step:
    """mdsp through the DeepSpeed engine, ZeRO stage 1."""
    tensor, pipeline, data_parallel = layout
    document = {
        "train_batch_size": SEQUENCES,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": 1.0,
        "mdsp": {
            "model": MODEL.model_dump(),
            "parallel": {"tensor": tensor, "pipeline": pipeline},
            "data": {"seq_length": SEQ},
        },
    }
    engine = build_engine(resolve_run_config(document, tensor * pipeline * data_parallel))
    data = batches(SEQUENCES // data_parallel)
    weights = torch.full((MICRO_BATCH, SEQ), 1.0 / (MICRO_BATCH * SEQ))

    def step() -> None:
        engine.train_batch(iter([(tokens, (labels, weights)) for tokens, labels in data]))

    return step


def contestant(name: str, rank: int, world_size: int, store: Path, pipe: Connection) -> None:
    """One process: set up, then one step per message; answers with its seconds."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # lives as long as the process
    torch.set_num_threads(CORES // world_size)
    layout = CONTESTANTS[name]
    if layout is None:
        step = transformers_step() if name == "transformers" else layers_step()
    else:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # never opened: the ranks meet in a file
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        join_job(Place(rank, world_size, rank, world_size), timeout_s=600)
        torch.set_num_threads(CORES // world_size)
        step = engine_step(layout)
    while pipe.recv():
        start = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - start)


class Job:
    """The processes of one contestant."""

    def __init__(self, name: str, folder: Path) -> None:
        layout = CONTESTANTS[name] or (1, 1, 1)
        self.ranks = layout[0] * layout[1] * layout[2]
        fork = multiprocessing.get_context("fork")
        self._pipes = []
        for rank in range(self.ranks):
            mine, theirs = fork.Pipe()
            store = folder / name.replace(" ", "-")
            fork.Process(target=contestant, args=(name, rank, self.ranks, store, theirs), daemon=True).start()
            self._pipes.append(mine)

    def step(self) -> float:
        """Seconds of one optimizer step, the slowest rank's."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(float(pipe.recv()) for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every contestant, round by round; a first round is not counted."""
    with tempfile.TemporaryDirectory() as name:
        jobs = {contestant_name: Job(contestant_name, Path(name)) for contestant_name in CONTESTANTS}
        for job in jobs.values():
            job.step()
        seconds: dict[str, list[float]] = {contestant_name: [] for contestant_name in CONTESTANTS}
        for _ in range(rounds):
            for contestant_name, job in jobs.items():
                seconds[contestant_name].append(job.step())
        for job in jobs.values():
            job.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="optimizer steps of each contestant that count")
    rounds = parser.parse_args().rounds
    deepspeed.utils.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    seconds = measure(rounds)
    torch.set_num_threads(CORES)
    peak = measure_gemm_peak(torch.device("cpu"), torch.float32, seconds=1.0)
    flops = SEQUENCES * model_flops(MODEL, SEQ)

    def ratio(a: str, b: str) -> float:
        """Speed of a over speed of b, median over rounds."""
        return statistics.median(y / x for x, y in zip(seconds[a], seconds[b], strict=True))

    table = Table(title=f"{rounds} rounds; GEMM peak {peak / 1e9:.0f} GFLOP/s; model FLOPs, causal attention halved")
    for heading in ("contestant", "tokens/s", "of the peak", "to transformers", "to mdsp, bubble discounted"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, layout in CONTESTANTS.items():
        middle = statistics.median(seconds[name])
        bubble = theoretical_bubble(layout[1], SEQUENCES // MICRO_BATCH // layout[2]) if layout else 0.0
        table.add_row(
            name,
            f"{SEQUENCES * SEQ / middle:.0f}",
            f"{100 * flops / middle / peak:.0f} %",
            f"{ratio(name, 'transformers'):.2f}",
            f"{ratio(name, 'mdsp') / (1 - bubble):.2f}" if layout else "",
        )
    console = Console()
    console.print(table)
    console.print(
        f"the engine costs {100 * (1 - ratio('mdsp', 'mdsp layers, no engine')):.1f} % of the speed of mdsp's layers"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
