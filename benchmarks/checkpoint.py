"""Checkpoint write throughput against `cp` of the same bytes, and what saving in the background costs training.

Trains a GPT-2-shaped model on one or more CPU ranks, and prints, from one run:

- bytes per second of a save (files hashed, flushed to the disk, manifest, rename) and of `cp -r` of the finished
  checkpoint, without and with a flush to the disk, the median of several of each, taken in turn;
- the time for which training stood still per save, in the foreground and in the background, as a share of a step, and
  how much longer the steps become while the writer is at work;
- seconds to verify every byte, to resume at the same layout, and to resume through the universal form.

Usage: python benchmarks/checkpoint.py [--work DIR] [--layers N] [--hidden N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SEQ, MICRO_BATCH, MICRO_BATCHES, VOCAB = 256, 2, 4, 8192


def document(layers: int, hidden: int) -> dict[str, Any]:
    """The run's configuration."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "mdsp": {
            "model": {
                "family": "gpt2",
                "n_layers": layers,
                "hidden_size": hidden,
                "n_heads": hidden // 64,
                "vocab_size": VOCAB,
                "max_positions": SEQ,
            },
            "data": {"seq_length": SEQ},
        },
    }


def _step(engine: Any, step: int) -> float:
    import torch

    tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    weights = torch.full((MICRO_BATCH, SEQ), 1 / (MICRO_BATCH * SEQ))
    batch = (tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), weights))
    started = time.perf_counter()
    engine.train_batch(iter([batch] * MICRO_BATCHES))
    return time.perf_counter() - started


def _copy(source: Path, target: Path, flush: bool) -> float:
    shutil.rmtree(target, ignore_errors=True)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    if flush:
        subprocess.run(["sync", *[path for path in target.rglob("*") if path.is_file()]], check=True)
    return time.perf_counter() - started


def measure(work: Path, layers: int, hidden: int, repeats: int) -> dict[str, float]:
    """All numbers, in seconds and bytes."""
    import torch

    from mdsp.checkpoint.counters import Counters
    from mdsp.checkpoint.rotation import remove_tree
    from mdsp.checkpoint.training import PendingSave, find_checkpoint, load_training_checkpoint
    from mdsp.checkpoint.universal import convert_to_universal
    from mdsp.config.load import resolve_run_config
    from mdsp.engine.build import build_engine
    from mdsp.engine.distributed import join_job
    from mdsp.rank_output import Place

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    join_job(Place(0, 1, 0, 1), 600.0)
    run = resolve_run_config(document(layers, hidden), 1)
    engine = build_engine(run)
    _step(engine, 0)
    saves, copies, flushed_copies, steps, stalls, slowed, step = [], [], [], [], [], [], 1
    for _ in range(repeats):
        pending = PendingSave(engine, run, work, Counters(step=step), background=False)
        checkpoint = pending.finish()
        saves.append(pending.stall_s)
        copies.append(_copy(checkpoint, work / "copy", flush=False))
        flushed_copies.append(_copy(checkpoint, work / "copy", flush=True))
        shutil.rmtree(work / "copy")
        steps += [_step(engine, step), _step(engine, step + 1)]
        pending = PendingSave(engine, run, work, Counters(step=step), background=True)
        taken = pending.stall_s
        while not pending.written:
            slowed.append(_step(engine, step))
        before = pending.stall_s
        pending.finish()
        stalls.append(taken + pending.stall_s - before)
        step += 1
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    started = time.perf_counter()
    found = find_checkpoint(None, str(checkpoint))
    verified = time.perf_counter()
    assert found is not None
    load_training_checkpoint(engine, run, found)
    loaded = time.perf_counter()
    remove_tree(convert_to_universal(found.path, found.manifest))
    converted = time.perf_counter()
    torch.distributed.destroy_process_group()
    return {
        "bytes": size,
        "save_s": statistics.median(saves),
        "cp_s": statistics.median(copies),
        "cp_and_sync_s": statistics.median(flushed_copies),
        "step_s": statistics.median(steps),
        "step_while_writing_s": statistics.median(slowed) if slowed else float("nan"),
        "background_stall_s": statistics.median(stalls),
        "verify_s": verified - started,
        "load_s": loaded - verified,
        "convert_to_universal_s": converted - loaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of training checkpoints.")
    parser.add_argument("--work", type=Path, default=None, help="where to write; a temporary directory by default")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="mdsp-checkpoint-") as name:
        numbers = measure(Path(name), arguments.layers, arguments.hidden, arguments.repeats)
    print(json.dumps(numbers, indent=1))
    size = numbers["bytes"] / 1e9
    for what in ("save_s", "cp_s", "cp_and_sync_s", "verify_s", "load_s", "convert_to_universal_s"):
        print(f"{what.removesuffix('_s'):<22} {numbers[what]:7.2f} s   {size / numbers[what]:6.2f} GB/s")
    print(f"save / cp                  {numbers['cp_s'] / numbers['save_s']:.2f} of its speed")
    print(f"save / cp and sync         {numbers['cp_and_sync_s'] / numbers['save_s']:.2f} of its speed")
    print(f"foreground stall           {numbers['save_s'] / numbers['step_s']:.2f} steps")
    print(f"background stall           {numbers['background_stall_s'] / numbers['step_s']:.2f} steps")
    print(f"steps while writing        {numbers['step_while_writing_s'] / numbers['step_s']:.2f} x as long")


if __name__ == "__main__":
    main()
