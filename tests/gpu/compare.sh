#!/usr/bin/env bash
# Trains one model under several pipelines, four ranks on the first GPU, and prints one table
# (docs/compare.md); run.sh ends with it. At most five minutes.
#
#     bash tests/gpu/compare.sh [OPTIONS OF COMPARE]
#
# Processes take turns on a GPU, so four ranks of a pipeline would not compute at once. Under NVIDIA's
# MPS they do, each on a quarter of the multiprocessors. The daemon is ours alone, with folders of its
# own, and ends with this script; no setting of the GPU is touched. Without the daemon's program
# nothing is measured. Megatron's own schedule runs over our transport, since NCCL refuses two ranks on
# one GPU. MEGATRON_EXT_GPU_CHECKS=emulated rehearses all but MPS on the emulated device.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3}
limit_s=300
work=$(mktemp -d /tmp/megatron-ext-gpu.XXXXXX)
control=
comparison=

finish() {
    trap '' INT TERM
    # It ends its ranks, too. Not SIGINT, which processes in the background of a script ignore.
    if [[ -n $comparison ]] && kill -0 "$comparison" 2>/dev/null; then
        kill -TERM "$comparison"
        timeout 30 tail --pid="$comparison" -f /dev/null || kill -KILL "$comparison" || true
    fi
    if [[ -n $control ]]; then
        daemon=$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid" 2>/dev/null || true)
        echo "quit -t 5" | timeout 20 "$control" >/dev/null 2>&1 || true
        if [[ -n $daemon ]] && ! timeout 10 tail --pid="$daemon" -f /dev/null; then
            kill -KILL "$daemon" || true
        fi
    fi
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ ${MEGATRON_EXT_GPU_CHECKS:-cuda} == emulated ]]; then
    export MEGATRON_EXT_DEVICE=musa
    exports=$("$python" -c 'import shlex, sys; sys.path[:0] = ["."]
from tests.fake_musa.build import environment
from tests.fake_musa.queued import queued
for name, value in {**environment(devices=1), **queued()}.items(): print(f"export {name}={shlex.quote(value)}")')
    eval "$exports" # in two lines, so that a failed build ends the script
    forwarded=(--env FAKE_MUSA_LIBRARY --env FAKE_MUSA_DEVICES --env FAKE_MUSA_ASYNC --env FAKE_MUSA_COST
        --env FAKE_MUSA_STUCK_S)
    size=(--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32
        --max-position-embeddings 32 --vocab-size 127)
    layers=(--transformer-impl local)
    steps=(--steps 4 --rounds 1)
    limit_s=3600 # the host's speed says nothing of a GPU's
else
    for program in "$(command -v nvidia-cuda-mps-control || true)" \
        "$(dirname "$(command -v nvidia-smi || echo /usr/bin/)")/nvidia-cuda-mps-control" \
        /usr/bin/nvidia-cuda-mps-control /usr/local/nvidia/bin/nvidia-cuda-mps-control; do
        [[ -x $program ]] && control=$program && break
    done
    if [[ -z $control ]]; then
        echo "compare.sh: measures nothing: nvidia-cuda-mps-control, a program of NVIDIA's driver, is not" \
            "here, and without it ranks take turns on the GPU"
        exit 0
    fi
    export CUDA_MPS_PIPE_DIRECTORY=$work/pipe CUDA_MPS_LOG_DIRECTORY=$work/log
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 # of each client
    export CUDA_DEVICE_MAX_CONNECTIONS=8 MEGATRON_EXT_DEVICE=cuda
    export CUBLAS_WORKSPACE_CONFIG=:4096:8 NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 # repeatable products
    mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if ! timeout 20 "$control" -d; then
        echo "compare.sh: measures nothing: $control did not start" >&2
        exit 1
    fi
    forwarded=()
    size=(--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
        --max-position-embeddings 2048 --vocab-size 32000)
    layers=(--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
        --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion)
    if "$python" -c 'import transformer_engine.pytorch' 2>/dev/null; then
        layers=(--transformer-impl transformer_engine)
    fi
    steps=(--steps 12 --rounds 2)
fi

# Each rank sees one GPU as its first.
export PYTHONPATH=$PWD/tests/gpu/first_gpu${PYTHONPATH:+:$PYTHONPATH}
over_ours="--pipeline-transport shm"
timeout --signal=TERM --kill-after=30 "$limit_s" "$python" -m megatron_ext compare --nproc 4 \
    "${forwarded[@]}" "${steps[@]}" -o "$work/compare" \
    --reference "$over_ours" \
    --with "--pipeline-schedule zb-h1 $over_ours" \
    --with "--pipeline-schedule zb-v $over_ours" "$@" \
    -- pretrain_gpt.py "${size[@]}" "${layers[@]}" --bf16 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 --no-gradient-accumulation-fusion --clip-grad 0 \
    --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 \
    --train-iters 100 --log-interval 1 --eval-iters 0 --eval-interval 1000 --mock-data \
    --tokenizer-type NullTokenizer --distributed-backend gloo &
comparison=$!
code=0
wait "$comparison" || code=$?
comparison=
((code != 124)) || echo "compare.sh: stopped after $limit_s s; what had ended by then is above" >&2
((code)) && tail -n 20 "$work"/compare/*.log >&2 || true
exit "$code"
