"""Speed and memory of `mdsp convert` against `cp -r` and against `transformers` load + save, in one run.

Makes two random bfloat16 Llama-shaped checkpoints (1.1B and 2.2B parameters), converts each to TP2 x PP2 and back in
processes of their own, and prints:

- throughput between the two sizes, (bytes_2 - bytes_1) / (time_2 - time_1), so that start-up does not count, as a
  ratio to a warm `cp -r` of the same files measured in the same way; hashing, NaN check and fsync are included for
  mdsp, `cp` does none of them (a `cp` followed by fsync is shown beside it);
- the whole process on the smaller one against `transformers` from_pretrained + save_pretrained, both with imports;
- the peak of anonymous memory (RssAnon) above that of an idle Python interpreter.

Usage: python benchmarks/convert.py [--work DIR] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 4, 32000
LAYERS = {"1.1B": 22, "2.2B": 47}

SETTLE_SECONDS = 3
"""Pause before each command. A virtual machine may give freed memory back to its host after a second or two, and taking
it again costs more than copying into it: whoever begins right after files were removed would be spared that."""

MAKE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
out, layers, hidden, ffn, heads, kv, vocab = Path(sys.argv[1]), *map(int, sys.argv[2:])
out.mkdir(parents=True)
draw = torch.Generator().manual_seed(0)
def random(*shape):
    return torch.empty(shape).normal_(0, 0.02, generator=draw).to(torch.bfloat16)
width = hidden // heads * kv
def block(i):
    p = f"model.layers.{i}."
    return {p + "input_layernorm.weight": random(hidden), p + "post_attention_layernorm.weight": random(hidden),
            p + "self_attn.q_proj.weight": random(hidden, hidden), p + "self_attn.k_proj.weight": random(width, hidden),
            p + "self_attn.v_proj.weight": random(width, hidden), p + "self_attn.o_proj.weight": random(hidden, hidden),
            p + "mlp.gate_proj.weight": random(ffn, hidden), p + "mlp.up_proj.weight": random(ffn, hidden),
            p + "mlp.down_proj.weight": random(hidden, ffn)}
tensors = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": random(hidden),
           "lm_head.weight": random(vocab, hidden)}
for i in range(layers):
    tensors |= block(i)
save_file(tensors, out / "model.safetensors", {"format": "pt"})
json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
           "hidden_size": hidden, "intermediate_size": ffn,
           "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
           "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
           "tie_word_embeddings": False, "hidden_act": "silu"}, open(out / "config.json", "w"))
"""

TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process, or 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def run(command: list[str]) -> tuple[float, int]:
    """Seconds and peak RssAnon of a command; earlier writes are on the disk before it starts."""
    os.sync()
    time.sleep(SETTLE_SECONDS)
    begun, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.005)
    seconds = time.perf_counter() - begun
    assert process.stderr is not None
    if process.returncode:
        raise RuntimeError(f"{command} failed: {process.stderr.read().decode()[-2000:]}")
    process.stderr.close()
    return seconds, peak


def fsync_all(directory: Path) -> float:
    """Seconds until the files of a directory are on the disk."""
    begun = time.perf_counter()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - begun


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def measure(work: Path, repeats: int) -> None:
    """Run everything and print the table."""
    convert = [sys.executable, "-m", "mdsp", "convert"]
    sources = {name: work / f"hf-{name}" for name in LAYERS}
    for name, layers in LAYERS.items():
        sizes = [str(number) for number in (layers, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB)]
        subprocess.run([sys.executable, "-c", MAKE, str(sources[name]), *sizes], check=True)
    sharded, back, copy = work / "sharded", work / "back", work / "copy"
    best: dict[tuple[str, str], float] = {}
    peaks: dict[tuple[str, str], int] = {}

    def note(what: str, name: str, seconds: float, peak: int = 0) -> None:
        key = (what, name)
        best[key] = min(best.get(key, math.inf), seconds)
        peaks[key] = max(peaks.get(key, 0), peak)

    small = next(iter(LAYERS))
    for _ in range(repeats):
        for name, source in sources.items():
            seconds, _ = run(["cp", "-r", str(source), str(copy)])
            note("cp", name, seconds)
            note("cp+fsync", name, seconds + fsync_all(copy))
            shutil.rmtree(copy)
            note(
                "from-hf",
                name,
                *run([*convert, "from-hf", str(source), str(sharded), "--tensor", "2", "--pipeline", "2"]),
            )
            note("to-hf", name, *run([*convert, "to-hf", str(sharded), str(back)]))
            shutil.rmtree(sharded)
            shutil.rmtree(back)
        note("transformers", small, run([sys.executable, "-c", TRANSFORMERS, str(sources[small]), str(copy)])[0])
        shutil.rmtree(copy)
    transformers_seconds = best["transformers", small]
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"])
    time.sleep(1)
    interpreter = anonymous_bytes(idle.pid)
    idle.wait()

    sizes_in_bytes = [size_of(source) for source in sources.values()]
    first, second = LAYERS
    rates = {}
    for what in ("cp", "cp+fsync", "from-hf", "to-hf"):
        elapsed = best[what, second] - best[what, first]
        rates[what] = (sizes_in_bytes[1] - sizes_in_bytes[0]) / elapsed
        times = ", ".join(f"{name} {best[what, name]:.2f} s" for name in LAYERS)
        print(
            f"{what:9s} {times}; between the sizes {rates[what] / 1e9:.2f} GB/s, {rates[what] / rates['cp']:.2f} of cp"
        )
    largest = VOCAB * HIDDEN * 2
    bound = 3 * largest + 400 * 10**6
    print(f"transformers load + save on {small}: {transformers_seconds:.2f} s, imports included")
    for what in ("from-hf", "to-hf"):
        print(f"whole {what} process: {best[what, small] / transformers_seconds:.2f} of that")
    for (what, name), peak in peaks.items():
        if peak:
            print(
                f"peak RssAnon {what} {name}: {(peak - interpreter) / 1e6:.0f} MB above the interpreter "
                f"(bound {bound / 1e6:.0f} MB)"
            )
    result = {
        "rates": rates,
        "transformers_seconds": transformers_seconds,
        "seconds": {f"{what} {name}": value for (what, name), value in best.items()},
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="directory on the disk to measure (default: temporary)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        measure(Path(work), args.repeats)


if __name__ == "__main__":
    main()
