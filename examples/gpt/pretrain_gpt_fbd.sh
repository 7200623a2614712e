#!/usr/bin/env bash
# Trains a GPT model with forward passes and backward passes in different processes:
#
#   bash examples/gpt/pretrain_gpt_fbd.sh $RANK --data-path PREFIX ...
#
# RANK is the number of this machine among NNODES (default: 1). You can omit it on a single machine. A replica has
# (TP + 1) x PP = 6 processes: each stage has one for its forwards and TP = 2 for its backwards. Without
# --ignore-forward-tensor-parallel, a replica has 2 x TP x PP = 8 processes. All flags of run.sh are accepted.
set -euo pipefail

export NODE_RANK=${NODE_RANK:-0}
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    NODE_RANK=$1
    shift
fi

TRAINING_ARGS=(
    --forward-backward-disaggregating
    --ignore-forward-tensor-parallel
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --hidden-dropout 0
    --attention-dropout 0
)

NPROC=${NPROC:-6} exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --size 1b "${TRAINING_ARGS[@]}" "$@"
