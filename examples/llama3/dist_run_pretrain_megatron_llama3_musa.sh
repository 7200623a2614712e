#!/usr/bin/env bash
# Trains Llama 3 8B on Moore Threads GPUs: on the nodes of the file "hostfile" beside this script, one
# address on each line, or of the file that HOSTFILE names; without such a file on this machine. Further
# flags are those of run.sh.
set -euo pipefail

HERE="$(dirname "${BASH_SOURCE[0]}")"
HOSTS=()
if [[ -n ${HOSTFILE:-} || -f $HERE/hostfile ]]; then
    HOSTS=(--hostfile "${HOSTFILE:-$HERE/hostfile}")
fi
exec bash "$HERE/run.sh" "${HOSTS[@]}" --device-backend musa "$@"
