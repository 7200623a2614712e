#!/usr/bin/env bash
# Trains a GPT model on two machines with dynamic pipeline parallelism. Run this script on the first machine and
# run_worker.sh on the second, with the same flags. The first address in --node-ips is that of the first machine:
#
#   bash examples/gpt/run_master.sh --node-ips 10.0.0.1 10.0.0.2 --data-path PREFIX ...
#
# All flags of run.sh are accepted.
set -euo pipefail

TRAINING_ARGS=(
    --use-dpp # remove it to get Megatron's own interleaved schedule
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 2
    --tensor-model-parallel-size 4
    --trace # what each rank did when, in benchmark/
)

export NNODES=2 NODE_RANK=${NODE_RANK:-0}
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --size 1b "${TRAINING_ARGS[@]}" "$@"
