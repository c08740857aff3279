#!/usr/bin/env bash
# From nothing to a trained, exported and sampled GPT: installs what is missing, then trains on the text of Python's own
# standard library with tensor parallelism 2 x pipeline 2 x ZeRO-1 data parallelism 2, on GPUs or on CPU cores.
# Arguments go to the training, e.g. ./launch/quickstart.sh --set mdsp.train.steps=20
# MDSP_RUN_DIR=elsewhere ./launch/quickstart.sh keeps the run out of runs/quickstart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

run=${MDSP_RUN_DIR:-runs/quickstart}
config=ds_configs/quickstart.json

# The GPUs that are there, up to eight; with fewer, the axes shrink in the order data, pipeline, tensor. Without GPUs,
# eight processes share the CPU's cores.
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
tensor=2 pipeline=2 ranks=8
if ((gpus == 0)); then
    export DS_ACCELERATOR=cpu
elif ((gpus < 2)); then
    tensor=1 pipeline=1 ranks=1
elif ((gpus < 4)); then
    pipeline=1 ranks=2
elif ((gpus < 8)); then
    ranks=4
fi

step() { printf '\n== %s\n' "$*"; }

if [[ -f $run/data/stdlib.json ]]; then
    step "1/4  Tokens are there: $run/data"
else
    step "1/4  Tokenising the standard library (a BPE of 4,096 tokens, Megatron's .bin/.idx)"
    mdsp prepare --stdlib --train-tokenizer 4096 --valid-fraction 0.02 --output "$run/data/stdlib"
fi

step "2/4  Training: tensor $tensor x pipeline $pipeline x data $((ranks / tensor / pipeline)), some seconds until the first step"
rm -rf "$run/checkpoints" "$run/hf" "$run"/*.jsonl "$run/logs"
deepspeed --quiet --num_accelerators $ranks --module mdsp.train --deepspeed_config $config \
    --set mdsp.parallel.tensor=$tensor --set mdsp.parallel.pipeline=$pipeline \
    --set "mdsp.data.train=$run/data/stdlib_train" --set "mdsp.data.valid=$run/data/stdlib_valid" \
    --set "mdsp.data.tokenizer=$run/data/stdlib_tokenizer" \
    --set "mdsp.checkpoint.dir=$run/checkpoints" --set "mdsp.monitor.dir=$run" "$@"

step "3/4  Exporting to Hugging Face format"
mdsp convert to-hf "$run/checkpoints" "$run/hf"

step "4/4  Loading the export with plain transformers"
python launch/quickstart_report.py "$run"
