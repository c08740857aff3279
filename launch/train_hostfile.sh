#!/usr/bin/env bash
# Trains on the hosts of a hostfile ("name slots=8" on each line):
#   launch/train_hostfile.sh FILE HOSTFILE MASTER_ADDR [--set KEY=VALUE ...]        started once, reaches the others by ssh
#   NODE_RANK=n launch/train_hostfile.sh FILE HOSTFILE MASTER_ADDR [--set ...]      started on every host n, without ssh
# The repository and the data must lie at the same path on all hosts. SSH_PORT and MASTER_PORT change the ports.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ $# -ge 3 ]] || { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
config=$1 hostfile=$2 master=$3
shift 3

"$root/launch/setup.sh"
export PATH="$root/.venv/bin:$PATH"
ranks=$(sed 's/#.*//' "$hostfile" | awk -F'slots=' 'NF > 1 { n += $2 } END { print n + 0 }')
mdsp config check "$config" --world-size "$ranks" "$@"

# Without the name of the interface gloo may resolve the host name to the loopback address, and hosts do not find each
# other. .deepspeed_env in the working directory carries further variables to all hosts.
if [[ -n ${GLOO_SOCKET_IFNAME:-} && ! -f .deepspeed_env ]]; then
    echo "GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME" >.deepspeed_env
fi

options=(--hostfile "$hostfile" --master_addr "$master" --master_port "${MASTER_PORT:-29500}")
if [[ -n ${NODE_RANK:-} ]]; then
    options+=(--no_ssh --node_rank "$NODE_RANK")
else
    # The launcher's own check of ssh does not know other ports.
    options+=(--no_ssh_check --ssh_port "${SSH_PORT:-22}")
fi
exec deepspeed "${options[@]}" --module mdsp.train --deepspeed_config "$config" "$@"
