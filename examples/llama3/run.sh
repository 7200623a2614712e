#!/usr/bin/env bash
# Trains a Llama 3; see README.md beside this file, or --help.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/common.sh
source "$HERE/../common.sh"
# shellcheck source=examples/llama3/model.env
source "$HERE/model.env"

usage() {
    cat <<'TEXT'
usage: bash examples/llama3/run.sh [--tiny] [--dry-run] [--embedded] [--out DIR] [MEGATRON_FLAGS...]

  --tiny      a small model on Python's manual, in minutes, also without a GPU; run again to resume
  --dry-run   print the command instead of running it
  --embedded  the trainer of this package even where a Megatron-LM tree is found
  --out DIR   checkpoints and logs (default: examples/llama3/out/tiny or .../8b)

Any other flag goes to Megatron and wins over the script's own, for example
--pipeline-schedule NAME (megatron-ext plan compares them). The 8B model needs --data-path PREFIX
and --tokenizer-model DIR (a Hugging Face directory of the Llama 3 tokenizer).

Environment: NPROC (processes on this node), MEGATRON_EXT_DEVICE (auto, cuda, musa, cpu),
MEGATRON_LM_PATH (a Megatron-LM tree), VIRTUAL_ENV (an environment to use as it is), PYTHON3;
several nodes: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
TEXT
}

parse_options() {
    TINY=false DRY_RUN=false EMBEDDED=() OUT='' EXTRA=()
    while (($# > 0)); do
        case $1 in
            --tiny) TINY=true ;;
            --dry-run) DRY_RUN=true ;;
            --embedded) EMBEDDED=(--embedded) ;;
            --out)
                (($# > 1)) || fail "--out needs a directory"
                OUT=$2
                shift
                ;;
            -h | --help)
                usage
                exit 0
                ;;
            --*) EXTRA+=("$1") ;;
            *)
                # A value of the flag before it; the first word cannot be one.
                ((${#EXTRA[@]} > 0)) || fail "unexpected \"$1\"; flags start with --, see --help"
                EXTRA+=("$1")
                ;;
        esac
        shift
    done
    local size=8b
    if $TINY; then
        size=tiny
    fi
    OUT=${OUT:-$HERE/out/$size}
}

# The pipeline schedule that the flags ask for; empty: Megatron's own.
schedule_of() {
    local word
    for word in "$@"; do
        if [[ $word == --enable-bitpipe-schedule ]]; then
            printf 'bitpipe\n'
            return
        fi
    done
    flag_value --pipeline-schedule "" "$@"
}

# Number of processes on this node, and the flags that follow from it.
choose_parallel() {
    local stages=2 schedule
    schedule=$(schedule_of "${EXTRA[@]}")
    if [[ $schedule == bitpipe || $schedule == dualpipe ]]; then
        stages=4 # two mirrored pipelines on the same processes
    fi
    if ! $TINY; then
        NPROC=${NPROC:-$FULL_NPROC}
        PARALLEL=(--pipeline-model-parallel-size "$stages" "${FULL_PARALLEL[@]}")
        if [[ -z $schedule ]]; then
            PARALLEL+=("${FULL_STAGES[@]}")
        fi
        return
    fi
    if [[ -z ${NPROC:-} ]]; then
        NPROC=$TINY_NPROC
        if [[ $DEVICE != cpu ]] && ((DEVICE_COUNT < NPROC)); then
            NPROC=$((DEVICE_COUNT > 1 ? 2 : 1))
        fi
    fi
    if ((stages == 4 && NPROC % 4 != 0)); then
        fail "--pipeline-schedule $schedule mirrors two pipelines: it needs a multiple of 4 processes, NPROC is $NPROC; take NPROC=4, or zb-v, which takes any even number"
    fi
    PARALLEL=(--pipeline-model-parallel-size $((NPROC % 2 == 0 ? stages : 1)) "${TINY_PARALLEL[@]}")
}

# Flags for kernels that this environment does not have.
choose_kernels() {
    KERNELS=()
    if [[ $DEVICE == cpu || $DEVICE == unknown ]]; then
        return # the CPU backend sets them itself
    fi
    if ! "$PYTHON" -c 'import transformer_engine' 2>/dev/null; then
        KERNELS=(--transformer-impl local --no-rope-fusion --no-persist-layer-norm
            --no-masked-softmax-fusion --no-gradient-accumulation-fusion)
    fi
}

choose_data() {
    if ! $TINY; then
        DATA=(--tokenizer-type HuggingFaceTokenizer)
        return
    fi
    local prefix=$REPO/examples/data/out/python_reference
    if ! $DRY_RUN; then
        python_reference "$prefix"
    fi
    DATA=(--data-path "${prefix}_text_document")
    if [[ $WAY == embedded ]]; then
        DATA+=(--tokenizer-type ByteLevelTokenizer --vocab-size 512)
    else
        # Upstream has no flag for its byte-level tokenizer. Training never tokenizes, it needs the
        # size of the vocabulary; this is the same size and so the same model.
        DATA+=(--tokenizer-type NullTokenizer --vocab-size 511)
    fi
}

launch_flags() {
    local nodes=${NNODES:-1}
    if ((nodes == 1)); then
        LAUNCH=(--standalone --nproc-per-node "$NPROC")
        return
    fi
    [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] ||
        fail "NNODES=$nodes needs NODE_RANK (0 to $((nodes - 1))) and MASTER_ADDR (the node with rank 0)"
    LAUNCH=(--nnodes "$nodes" --nproc-per-node "$NPROC" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
}

check_full_size() {
    if $TINY; then
        return
    fi
    [[ $DEVICE != cpu ]] ||
        fail "the 8B model needs accelerators and this machine has none that torch can use; try --tiny, or --dry-run"
    [[ -n $(flag_value --data-path "" "${EXTRA[@]}") ]] ||
        fail "the 8B model needs --data-path PREFIX (megatron-ext preprocess makes it) or --mock-data"
}

# Says where training starts and where it will stop. Returns 1 if there is nothing left to do.
announce() {
    local latest=0 total every
    local tracker=$OUT/checkpoints/latest_checkpointed_iteration.txt
    [[ ! -f $tracker ]] || latest=$(<"$tracker")
    total=$(flag_value --train-iters "" "${FLAGS[@]}")
    every=$(flag_value --exit-interval "" "${FLAGS[@]}")
    if ((latest == 0)); then
        say "starts from random weights, checkpoints go to $OUT/checkpoints"
    else
        say "resumes from iteration $latest of $OUT/checkpoints"
    fi
    # Megatron says what is wrong with other values.
    [[ $total =~ ^[0-9]+$ && $every =~ ^[1-9][0-9]*$ ]] || return 0
    if ((latest >= total)); then
        say "nothing to do: trained to --train-iters $total; give a larger one, or --out DIR for a new run"
        return 1
    fi
    local stop=$(((latest / every + 1) * every))
    say "trains to iteration $((stop < total ? stop : total)); run again to go on from there"
}

# First and last loss of this run, from Megatron's own log lines.
summary() {
    local losses
    losses=$(sed -n 's|.* iteration *\([0-9]*\)/.* lm loss: \([^ ]*\) .*|\1 \2|p' "$OUT/log.txt" |
        awk 'NR == 1 { first = $0 } { last = $0 } END {
            split(first, a); split(last, b)
            if (NR) printf "loss %.3f at iteration %d, %.3f at iteration %d", a[2], a[1], b[2], b[1] }')
    say "${losses:-no loss was logged (see --log-interval)}"
    say "checkpoint in ${OUT#"$REPO"/}/checkpoints, log in ${OUT#"$REPO"/}/log.txt; run again to resume"
}

# A dry run installs nothing: without an environment it shows the defaults.
look_around() {
    if $DRY_RUN && ! environment_exists; then
        PYTHON=python3 DEVICE=unknown DEVICE_COUNT=$TINY_NPROC WAY=embedded
        if [[ -n ${MEGATRON_LM_PATH:-} ]] && ((${#EMBEDDED[@]} == 0)); then
            WAY=upstream
        fi
        return
    fi
    prepare_environment run >&2
    detect_device "${EXTRA[@]}"
    choose_way "${EMBEDDED[@]}"
}

# torchrun ends with a report on every rank; what the user can mend was said in one line before it.
explain_failure() {
    local reason
    reason=$(grep -m 1 -o 'megatron_ext: error: .*' "$OUT/log.txt" || true)
    fail "training ended with exit code $1${reason:+: ${reason#megatron_ext: error: }} (log: $OUT/log.txt)"
}

main() {
    parse_options "$@"
    look_around
    if ! $DRY_RUN; then
        check_full_size
    fi
    choose_parallel
    choose_kernels
    choose_data
    launch_flags
    if $TINY; then
        FLAGS=("${TINY_MODEL[@]}" "${LLAMA3[@]}" "${PARALLEL[@]}" "${TINY_TRAINING[@]}")
    else
        FLAGS=("${FULL_MODEL[@]}" "${LLAMA3[@]}" "${PARALLEL[@]}" "${FULL_TRAINING[@]}")
    fi
    FLAGS+=("${KERNELS[@]}" "${DATA[@]}" --save "$OUT/checkpoints" --load "$OUT/checkpoints" "${EXTRA[@]}")
    local command=("$PYTHON" -m torch.distributed.run "${LAUNCH[@]}" -m megatron_ext "${EMBEDDED[@]}" pretrain_gpt.py "${FLAGS[@]}")
    if $DRY_RUN; then
        print_command "${command[@]}"
        return
    fi
    say "$NPROC processes on $DEVICE"
    mkdir -p "$OUT"
    announce || return 0
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    # Every process would warn of kernels that are not installed and of deprecated calls in Megatron.
    export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
    run_command "$OUT/log.txt" "${command[@]}" || explain_failure $?
    if $TINY; then
        summary
    fi
}

# In one line with its exit, so that editing this file does not disturb a run.
main "$@"; exit
