#!/usr/bin/env bash
# Trains a GPT model on this machine with dynamic pipeline parallelism. All flags of run.sh are accepted.
set -euo pipefail

TRAINING_ARGS=(
    --use-dpp # remove it to get Megatron's own interleaved schedule
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 2
    --tensor-model-parallel-size 2
    --trace # what each rank did when, in benchmark/
)

exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --size 1b "${TRAINING_ARGS[@]}" "$@"
