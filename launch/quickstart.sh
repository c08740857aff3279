#!/usr/bin/env bash
# From nothing to a trained, exported and sampled GPT: installs what is missing, then trains on the text of Python's own
# standard library with tensor parallelism 2 x pipeline 2 x ZeRO-1 data parallelism 2, on GPUs or on CPU cores.
# Arguments go to the training, e.g. ./launch/quickstart.sh --set mdsp.train.steps=20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

run=runs/quickstart
config=ds_configs/quickstart.json

# Eight ranks on GPUs where there are eight; otherwise on CPU cores, which eight processes share.
ranks=8
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
if ((gpus < ranks)); then
    export DS_ACCELERATOR=cpu
fi

step() { printf '\n\033[1m%s\033[0m\n' "$*"; }

if [[ ! -f $run/data/stdlib.json ]]; then
    step "1/4  Tokenising the standard library (BPE of 4,096 tokens, Megatron .bin/.idx)"
    mdsp prepare --stdlib --train-tokenizer 4096 --valid-fraction 0.02 --output $run/data/stdlib
else
    step "1/4  Tokens are there: $run/data"
fi

step "2/4  Training on $ranks ranks: tensor 2 x pipeline 2 x data 2"
rm -rf $run/checkpoints $run/hf $run/metrics.jsonl $run/timeline.jsonl $run/events.jsonl
deepspeed --quiet --num_accelerators $ranks --module mdsp.train --deepspeed_config $config "$@"

step "3/4  Exporting to Hugging Face format"
mdsp convert to-hf $run/checkpoints $run/hf

step "4/4  Loading the export with plain transformers"
python launch/quickstart_report.py $run
