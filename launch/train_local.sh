#!/usr/bin/env bash
# Trains on this machine:  launch/train_local.sh FILE [RANKS] [--set KEY=VALUE ...]
# RANKS defaults to the number of GPUs. Without GPUs say how many CPU processes: launch/train_local.sh FILE 8
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ $# -ge 1 ]] || { sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
config=$1
shift

ranks=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    ranks=$1
    shift
fi
[[ $ranks -ge 1 ]] || { echo "train_local.sh: no GPU found; say how many CPU processes to start" >&2; exit 2; }

"$root/launch/setup.sh"
export PATH="$root/.venv/bin:$PATH"
if ! command -v nvidia-smi >/dev/null; then
    # One thread per rank, or the ranks fight for the cores.
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi

mdsp config check "$config" --world-size "$ranks" "$@"
exec deepspeed --num_accelerators "$ranks" --module mdsp.train --deepspeed_config "$config" "$@"
