"""The end of the quickstart: a sample from the exported model, by plain transformers, and what the run was."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from mdsp.data.sidecar import read_sidecar
from mdsp.metrics.run import Run, read_run

PROMPT = "def __init__(self"


def sample(directory: Path) -> str:
    """A continuation of PROMPT by the exported model."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(0)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=48, do_sample=True, temperature=0.7, top_k=40)
    text: str = tokenizer.decode(out[0], skip_special_tokens=True)
    return text


def percent(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def summary(run: Run, directory: Path) -> Table:
    """Layout, result and speed of the run, and where its files are."""
    layout, entropy = run.info["layout"], read_sidecar(directory / "data" / "stdlib.json").unigram_entropy_nats
    # The first step pays for warm-up.
    speeds = [value for _, value in run.series("tokens_per_s")][1:]
    rates = [value for _, value in run.series("model_tflops_per_device")][1:]
    losses, measured = run.series("loss"), [value for _, value in run.series("bubble_measured")][1:]
    held_out = run.series("eval_loss")
    stages, micro_batches = layout["pipeline"], layout["gradient_accumulation_steps"]
    rows = {
        "layout": f"tensor {layout['tensor']} x pipeline {stages} x data {layout['data']}, ZeRO stage 1",
        "parameters": f"{run.info['parameters']:,}",
        "steps": f"{losses[-1][0]} of {layout['global_batch']} samples",
        "loss": f"{losses[0][1]:.3f} -> {losses[-1][1]:.3f} nats per token",
        "held-out loss": f"{held_out[-1][1]:.3f}" if held_out else "not measured",
        "entropy of single tokens": f"{entropy:.3f} (a loss below it has learnt from context)",
        "tokens/s": f"{statistics.median(speeds):,.0f}" if speeds else "not measured",
        "model TFLOP/s": f"{statistics.median(rates):.4f} per device (causal attention halved)" if rates else "-",
        "bubble, theory": f"({stages} - 1) / ({micro_batches} + {stages} - 1) = {percent(run.last('bubble_theory'))}",
        "bubble, measured": percent(statistics.median(measured) if measured else None),
        "metrics, timelines": f"{directory}/metrics.jsonl, timeline.jsonl; mdsp report {directory}",
        "logs of the ranks": f"{directory}/logs/",
        "checkpoint": f"{directory}/checkpoints/",
        "Hugging Face model": f"{directory}/hf/",
    }
    table = Table(title="Quickstart", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def main() -> int:
    directory = Path(sys.argv[1])
    console = Console()
    console.print(sample(directory / "hf"), markup=False, highlight=False, style="dim")
    console.print(summary(read_run(directory), directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
