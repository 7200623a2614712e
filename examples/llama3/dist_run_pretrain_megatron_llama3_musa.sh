#!/usr/bin/env bash
# Trains Llama 3 8B on Moore Threads GPUs, on the nodes in the file "hostfile" in this folder, or in the file that
# HOSTFILE names, with one address per line. Without a hostfile, it trains on this machine. All flags of run.sh are
# accepted.
set -euo pipefail

HERE="$(dirname "${BASH_SOURCE[0]}")"
HOSTS=()
if [[ -n ${HOSTFILE:-} || -f $HERE/hostfile ]]; then
    HOSTS=(--hostfile "${HOSTFILE:-$HERE/hostfile}")
fi
exec bash "$HERE/run.sh" "${HOSTS[@]}" --device-backend musa "$@"
