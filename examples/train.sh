# shellcheck shell=bash disable=SC2034,SC2154
# Trains a model of the examples. This is the common part of their run.sh, which set HERE to the folder of
# the example and source this file. The model.env in that folder defines the model:
#
#   TITLE, SCRIPT, DEFAULT_SIZE   the name of the model, its Megatron-LM script, and its default size
#   ARCHITECTURE                  flags of the model at every size
#   size_NAME                     one function for each size, including tiny. It sets
#     MODEL, TRAINING, PARALLEL   flags; --pipeline-model-parallel-size is derived from PIPELINE
#     PIPELINE                    the number of pipeline stages
#     STAGES                      flags that split the layers unevenly or into virtual stages
#     EXPERT_PARALLEL             the number of ranks that share the experts of a layer
#     TOKENIZER, VOCAB_SIZE       flags of the published tokenizer; with --mock-data, only the size is used
#     CORPUS                      training data of the tiny size: bytes or word_pieces
#   MUSA_ENVIRONMENT              variables (NAME=VALUE) for Moore Threads GPUs

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Flags common to the published models.
readonly LLM_TRAINING=(
    --bf16
    --micro-batch-size 1
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 42
    --eval-interval 1000
    --eval-iters 0
    --split 1
    --log-interval 1
    --save-interval 500
)
readonly SHARDED=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
# Flags common to the small models. Each run stops and saves at the next multiple of the exit interval. The number
# of iterations may change when a run resumes, because the learning rate of the command line is used. The
# resharding flag allows a run to resume under any other pipeline schedule.
readonly TINY_TRAINING=(
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 1000
    --exit-interval 25
    --save-interval 25
    --dist-ckpt-optim-fully-reshardable
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-decay-iters 1000
    --lr-warmup-iters 20
    --override-opt_param-scheduler
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 42
    --split "95,5,0"
    --eval-interval 25
    --eval-iters 4
    --log-interval 10
)
readonly TINY_NPROC=4
readonly NODE_NPROC=8

EXAMPLE="$(basename "$HERE")"

usage() {
    cat <<TEXT
usage: bash examples/$EXAMPLE/run.sh [--tiny | --size SIZE] [--hostfile FILE] [--dry-run] [--raw]
           [--nproc N] [--out DIR] [MEGATRON_FLAGS...]

  --tiny           train a small $TITLE on Python's manual in minutes, with or without a GPU; run again to resume
  --size SIZE      one of: $(sizes) (default: $DEFAULT_SIZE)
  --hostfile FILE  train on all hosts of the file with megatron-ext launch (default: on this machine)
  --nproc N        processes on each node, like NPROC (default: one for each GPU; --tiny: at most $TINY_NPROC)
  --dry-run        print the command instead of running it
  --out DIR        checkpoints and logs (default: examples/$EXAMPLE/out/SIZE)
  --raw            show every line of Megatron's log instead of one line for each logged step

All other flags are passed to Megatron and override the flags of this script, for example
--pipeline-schedule NAME (megatron-ext plan compares schedules), --pipeline-transport NAME or
--device-backend NAME. Published sizes require --data-path PREFIX (created by examples/data/tokenize_text.py) and
the flags of their tokenizer, or --mock-data.

Environment variables: NPROC (processes on each node), MEGATRON_EXT_DEVICE (auto, cuda, musa, cpu),
MEGATRON_LM_PATH (a Megatron-LM tree), VIRTUAL_ENV (an environment to use unchanged), PYTHON3 (the Python that
creates .venv), TORCH_VERSION and MEGATRON_CORE (the releases that .venv gets).
For several nodes without a hostfile: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
TEXT
}

# --- The command line -----------------------------------------------------------------------------

sizes() { compgen -A function size_ | sed 's/^size_//' | paste -sd ' '; }

parse_options() {
    SIZE=$DEFAULT_SIZE DRY_RUN=false RAW=false OUT='' HOSTFILE='' EXTRA=()
    while (($# > 0)); do
        case $1 in
            --tiny) SIZE=tiny ;;
            --dry-run) DRY_RUN=true ;;
            --raw) RAW=true ;;
            --embedded) fail "--embedded no longer exists; remove it: Megatron's own loop trains" ;;
            --out=* | --size=* | --hostfile=* | --nproc=*)
                set -- "${1%%=*}" "${1#*=}" "${@:2}"
                continue
                ;;
            --out | --size | --hostfile | --nproc)
                [[ -n ${2:-} ]] || fail "$1 needs a value, see --help"
                case $1 in
                    --out) OUT=$2 ;;
                    --size) SIZE=$2 ;;
                    --hostfile) HOSTFILE=$2 ;;
                    --nproc) NPROC=$2 ;;
                esac
                shift
                ;;
            -h | --help)
                usage
                exit 0
                ;;
            --*)
                refuse_misspelt "${1%%=*}"
                EXTRA+=("$1")
                ;;
            *)
                # The word is a value of the previous flag, unless it is the first word.
                ((${#EXTRA[@]} > 0)) || fail "unexpected \"$1\"; flags start with --, see --help"
                EXTRA+=("$1")
                ;;
        esac
        shift
    done
    declare -F "size_$SIZE" >/dev/null || fail "--size $SIZE does not exist; use one of: $(sizes)"
    [[ -z $HOSTFILE || -f $HOSTFILE ]] ||
        fail "--hostfile $HOSTFILE does not exist; write a file with one node address per line"
    OUT=${OUT:-$HERE/out/$SIZE}
}

# Rejects misspelled flags of this script. They would be passed to Megatron, and a misspelled --tiny would start the
# published size.
refuse_misspelt() {
    local word=$1 option i
    for option in --tiny --size --dry-run --raw --out --hostfile --nproc; do
        for ((i = 2; i <= ${#option}; i++)); do
            case $word in
                "${option:0:i}"?"${option:i}" | "${option:0:i}"?"${option:i+1}" | "${option:0:i}${option:i+1}")
                    fail "$word is not a flag of this script; did you mean $option?"
                    ;;
            esac
        done
    done
}

# Loads the flags of the selected size. Resets the variables that only some sizes set.
load_size() {
    STAGES=() TOKENIZER=() EXPERT_PARALLEL=1 CORPUS=bytes
    "size_$SIZE"
}

is_tiny() { [[ $SIZE == tiny ]]; }

given() {
    local name=$1 word
    for word in "${EXTRA[@]}"; do
        if [[ $word == "$name" || $word == "$name="* ]]; then
            return 0
        fi
    done
    return 1
}

# Prints the pipeline schedule that the flags select, or nothing for Megatron's own schedule.
schedule_asked() {
    if given --enable-bitpipe-schedule; then
        printf 'bitpipe\n'
    else
        flag_value --pipeline-schedule "" "${EXTRA[@]}"
    fi
}

# --- Device, processes, kernels -------------------------------------------------------------------

# A dry run installs nothing. Without an environment, it shows the defaults.
look_around() {
    if $DRY_RUN && ! environment_exists; then
        PYTHON=python3 DEVICE=unknown DEVICE_COUNT=0
        return
    fi
    # Checked before a different release is installed.
    if ! $DRY_RUN && [[ $SCRIPT == pretrain_bert.py && -z ${VIRTUAL_ENV:-} && ! ${MEGATRON_CORE:-$NEWEST_CORE} =~ ^0\.1[67]\. ]]; then
        fail "megatron-core ${MEGATRON_CORE:-$NEWEST_CORE} has no $SCRIPT, which only trees up to 0.17 have; start again with MEGATRON_CORE=0.17.1 and MEGATRON_LM_PATH=DIR, a tree of core_v0.17.1"
    fi
    prepare_environment run >&2
    DEVICE=$(flag_value --device-backend "${MEGATRON_EXT_DEVICE:-auto}" "${EXTRA[@]}")
    # The machine that runs the launcher needs no GPU, so use the device that the user selected for the hosts.
    if [[ -z $HOSTFILE || $DEVICE == auto ]]; then
        detect_device "${EXTRA[@]}"
    fi
}

check_data() {
    if is_tiny; then
        return
    fi
    [[ $DEVICE != cpu || -n $HOSTFILE ]] ||
        fail "the $SIZE model needs accelerators, but this machine has none that torch can use; try --tiny, or --dry-run"
    given --data-path || given --mock-data ||
        fail "the $SIZE model needs --data-path PREFIX (examples/data/tokenize_text.py creates it) or --mock-data"
}

# Sets NPROC, the number of processes on this node, and WORLD, the number on all nodes. WORLD is 0 if the hostfile
# determines it.
choose_processes() {
    if [[ -n $HOSTFILE ]]; then
        WORLD=0
        return
    fi
    if [[ -z ${NPROC:-} ]]; then
        NPROC=$((DEVICE_COUNT > 0 ? DEVICE_COUNT : NODE_NPROC))
        if is_tiny; then
            NPROC=$TINY_NPROC
            if ((DEVICE_COUNT > 0 && DEVICE_COUNT < NPROC)); then
                NPROC=$((DEVICE_COUNT > 1 ? 2 : 1))
            fi
        fi
    fi
    [[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$NPROC is not a number of processes; give 1 or more"
    [[ ${NNODES:-1} =~ ^[1-9][0-9]*$ ]] || fail "NNODES=$NNODES is not a number of nodes; give 1 or more"
    WORLD=$((NPROC * ${NNODES:-1}))
}

# Succeeds if a schedule can run the published layer split. Megatron's own schedule always can. Schedules with one
# stage per rank can run uneven splits, and interleaved can run splits into virtual stages. If the first and last
# stage share a rank, an uneven split has no benefit.
keeps_cut() {
    case $1 in
        '') ;;
        1f1b | gpipe | zb-h1) [[ ${STAGES[0]-} == --decoder-* ]] ;;
        interleaved) [[ ${STAGES[0]-} == --num-layers-per-virtual-* ]] ;;
        *) return 1 ;;
    esac
}

# Sets SPLIT, the flags that split the model among the processes.
choose_split() {
    local schedule stages=$PIPELINE experts=$EXPERT_PARALLEL
    schedule=$(schedule_asked)
    if [[ $schedule == bitpipe || $schedule == dualpipe ]] && ((stages < 4)); then
        stages=4 # two mirrored pipelines on the same processes
    fi
    if is_tiny && ((WORLD > 0)); then
        if ((stages == 4 && WORLD % 4 != 0)); then
            fail "--pipeline-schedule $schedule mirrors two pipelines, so it needs a multiple of 4 processes, but NPROC is $NPROC; use NPROC=4, or zb-v, which accepts any even number"
        fi
        stages=$((WORLD % 2 == 0 ? stages : 1))
    fi
    SPLIT=(--pipeline-model-parallel-size "$stages" "${PARALLEL[@]}")
    # Published splits apply only to the published number of stages.
    if keeps_cut "$schedule" && ! given --pipeline-model-parallel-size &&
        ! given --num-layers-per-virtual-pipeline-stage && ! given --num-virtual-stages-per-pipeline-rank &&
        ! given --decoder-first-pipeline-num-layers && ! given --decoder-last-pipeline-num-layers &&
        ! given --pipeline-model-parallel-layout; then
        SPLIT+=("${STAGES[@]}")
    fi
    if is_tiny && ((WORLD == 0 || WORLD / stages % experts != 0)); then
        experts=1
    fi
    if ((experts > 1)); then
        SPLIT+=(--expert-model-parallel-size "$experts")
    fi
}

# Checks that the number of processes is a multiple of what one copy of the model or of its experts needs.
check_world() {
    local tp pp cp ep etp hosted
    tp=$(flag_value --tensor-model-parallel-size 1 "${FLAGS[@]}")
    pp=$(flag_value --pipeline-model-parallel-size 1 "${FLAGS[@]}")
    cp=$(flag_value --context-parallel-size 1 "${FLAGS[@]}")
    ep=$(flag_value --expert-model-parallel-size 1 "${FLAGS[@]}")
    etp=$(flag_value --expert-tensor-parallel-size "$tp" "${FLAGS[@]}")
    # These are counted differently, and checked together with the flags.
    ! given --forward-backward-disaggregating || return 0
    # Megatron says what is wrong with other values.
    [[ $tp-$pp-$cp-$ep-$etp =~ ^[1-9][0-9]*(-[1-9][0-9]*){4}$ ]] || return 0
    ((WORLD % (tp * pp * cp) == 0)) ||
        fail "one copy of the model takes tensor $tp x pipeline $pp$( ((cp == 1)) || printf ' x context %s' "$cp") = $((tp * pp * cp)) processes, but NNODES x NPROC is $WORLD; start a multiple (on several nodes: --hostfile FILE, or NNODES), or lower a size"
    hosted=$pp
    case $(schedule_asked) in
        bitpipe | dualpipe) hosted=$(((pp + 1) / 2)) ;; # two pipelines of half the ranks
    esac
    ((WORLD % (etp * ep * hosted) == 0)) ||
        fail "the experts take tensor $etp x expert $ep x pipeline $hosted = $((etp * ep * hosted)) processes, but NNODES x NPROC is $WORLD; start a multiple (on several nodes: --hostfile FILE, or NNODES), or lower --expert-model-parallel-size"
}

# Rejects flags that the job would reject after a minute of imports. With a hostfile, the launcher checks them.
check_flags() {
    local refusals
    if [[ -n $HOSTFILE || $DEVICE == unknown ]]; then
        return
    fi
    refusals=$("$PYTHON" - "$WORLD" "$DEVICE" "$SCRIPT" "${FLAGS[@]}" <<'PYTHON'
import sys

from megatron_ext import preflight
from megatron_ext.errors import line_of

world_size, device, *words = sys.argv[1:]
found = preflight(words, world_size=int(world_size), device=device)
print(*map(line_of, found.refusals), sep="\n", end="")
PYTHON
    ) || fail "the flags cannot be checked; the reason is above"
    [[ -z $refusals ]] || fail "$refusals"
}

# Sets KERNELS, the flags that disable kernels which this environment does not have.
choose_kernels() {
    KERNELS=()
    if [[ $DEVICE == cpu || $DEVICE == unknown ]]; then
        return # the CPU backend sets them itself
    fi
    if ! "$PYTHON" -c 'import transformer_engine' 2>/dev/null; then
        ! given --fp8-format ||
            fail "--fp8-format needs Transformer Engine, which $PYTHON cannot import; install it (on NVIDIA GPUs: pip install -e '.[te]'), or remove the flag"
        KERNELS=(--transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion)
    fi
    # The output layer needs Apex's kernel even with Transformer Engine.
    "$PYTHON" -c 'import fused_weight_gradient_mlp_cuda' 2>/dev/null || KERNELS+=(--no-gradient-accumulation-fusion)
}

# --- Data -----------------------------------------------------------------------------------------

choose_data() {
    DATA=()
    if given --mock-data; then
        # The largest id marks the end of a document.
        DATA=(--tokenizer-type NullTokenizer --vocab-size $((VOCAB_SIZE - 1)))
    elif ! is_tiny; then
        DATA=("${TOKENIZER[@]}")
    else
        "tiny_$CORPUS"
    fi
}

tiny_bytes() {
    local prefix=$REPO/examples/data/out/python_reference
    given --data-path || DATA=(--data-path "${prefix}_text_document")
    # Upstream has no flag for its byte-level tokenizer. Training does not tokenize, but it needs the size of the
    # vocabulary: the bytes, one id for the end of a document, and padding to a multiple of 512.
    DATA+=(--tokenizer-type NullTokenizer --vocab-size 511)
}

tiny_word_pieces() {
    local prefix=$REPO/examples/data/out/word_pieces
    given --data-path || DATA=(--data-path "${prefix}_text_sentence")
    DATA+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$prefix")
}

make_data() {
    if ! is_tiny || given --mock-data; then
        return
    fi
    case $CORPUS in
        bytes) python_reference "$REPO/examples/data/out/python_reference" ;;
        word_pieces) word_pieces "$REPO/examples/data/out/word_pieces" ;;
    esac
}

# --- Start ----------------------------------------------------------------------------------------

# Sets LAUNCH, the part of the command before the training script.
choose_launch() {
    local nodes=${NNODES:-1} master=${MASTER_ADDR:-}
    if [[ -n $HOSTFILE ]]; then
        LAUNCH=("$PYTHON" -m megatron_ext launch --hostfile "$HOSTFILE" ${NPROC:+--nproc "$NPROC"})
        if $DRY_RUN; then
            LAUNCH+=(--dry-run)
        fi
        if $RAW; then
            LAUNCH+=(--raw)
        fi
        LAUNCH+=(--)
        RAW=true # what the launcher shows is a person's view already
        return
    fi
    LAUNCH=("$PYTHON" -m torch.distributed.run --nproc-per-node "$NPROC")
    if ((nodes == 1)); then
        LAUNCH+=(--standalone)
    else
        if [[ -z $master ]]; then
            master=$(flag_value --node-ips "" "${EXTRA[@]}")
            master=${master%%,*} # the first node
        fi
        [[ -n ${NODE_RANK:-} && -n $master ]] ||
            fail "NNODES=$nodes needs NODE_RANK (0 to $((nodes - 1))) and MASTER_ADDR (the node with rank 0)"
        LAUNCH+=(--nnodes "$nodes" --node-rank "$NODE_RANK" --master-addr "$master"
            --master-port "${MASTER_PORT:-29500}")
    fi
    LAUNCH+=(-m megatron_ext)
}

# Sets ENVIRONMENT, the variables that every process gets unless the user has set them.
choose_environment() {
    # Megatron requires 1 for tensor parallelism on older GPUs. Pairs need several hardware queues.
    local connections=1
    [[ " ${EXTRA[*]} " != *" --overlap-moe-expert-parallel-comm "* ]] || connections=32
    # Otherwise every process warns about missing kernels and deprecated calls in Megatron.
    ENVIRONMENT=("CUDA_DEVICE_MAX_CONNECTIONS=$connections" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore)
    if [[ $DEVICE == musa ]]; then
        ENVIRONMENT+=("MUSA_VISIBLE_DEVICES=$(seq -s , 0 $((${NPROC:-$NODE_NPROC} - 1)))"
            MCCL_IB_GID_INDEX=3 # RoCE v2
            "${MUSA_ENVIRONMENT[@]}")
    fi
    local assignment name
    for assignment in "${ENVIRONMENT[@]}"; do
        name=${assignment%%=*}
        if [[ -z ${!name+set} ]]; then
            export "${assignment?}"
        fi
    done
}

# Prints how to resume the training from its checkpoints.
again() {
    local load save
    load=$(flag_value --load "" "${FLAGS[@]}")
    save=$(flag_value --save "" "${FLAGS[@]}")
    if [[ $load == "$save" && " ${FLAGS[*]} " != *" --finetune "* ]]; then
        printf 'run again\n'
    else
        printf 'run again with --load %s, without --finetune,\n' "$save"
    fi
}

# Prints where training starts and where it will stop. Returns 1 if there is nothing left to do.
announce() {
    local latest=0 load save total every
    load=$(flag_value --load "" "${FLAGS[@]}")
    save=$(flag_value --save "" "${FLAGS[@]}")
    total=$(flag_value --train-iters "" "${FLAGS[@]}")
    every=$(flag_value --exit-interval "" "${FLAGS[@]}")
    [[ ! -f $load/latest_checkpointed_iteration.txt ]] || latest=$(<"$load/latest_checkpointed_iteration.txt")
    if [[ $latest == 0 ]]; then
        say "starts from random weights, checkpoints go to $save"
    elif [[ $latest == release || " ${FLAGS[*]} " == *" --finetune "* ]]; then # these begin at iteration 0
        latest=0
        say "starts from the weights in $load, checkpoints go to $save"
    else
        say "resumes from iteration $latest of $load"
    fi
    # Megatron says what is wrong with other values.
    [[ $total =~ ^[0-9]+$ && $every =~ ^[1-9][0-9]*$ ]] || return 0
    if ((latest >= total)); then
        say "nothing to do: already trained to --train-iters $total; give a larger number, or --out DIR for a new run"
        return 1
    fi
    local stop=$(((latest / every + 1) * every))
    say "trains to iteration $((stop < total ? stop : total)); $(again) to continue from there"
}

# Prints the first and last loss of this run, from Megatron's log lines.
summary() {
    local losses save
    losses=$(sed -n 's|.* iteration *\([0-9]*\)/.* lm loss: \([^ ]*\) .*|\1 \2|p' "$OUT/log.txt" |
        awk 'NR == 1 { first = $0 } { last = $0 } END {
            split(first, a); split(last, b)
            if (NR) printf "loss %.3f at iteration %d, %.3f at iteration %d", a[2], a[1], b[2], b[1] }')
    say "${losses:-no loss was logged here (the last rank logs them; see --log-interval)}"
    save=$(flag_value --save "" "${FLAGS[@]}")
    say "checkpoint in ${save#"$REPO"/}, log in ${OUT#"$REPO"/}/log.txt; $(again) to resume"
}

# torchrun ends with a report on every rank. The line before the report names the mistake that the user can fix.
explain_failure() {
    local reason reached latest event
    case $1 in
        129) event="stopped by SIGHUP" ;;
        130) event=interrupted ;;
        143) event="stopped by SIGTERM" ;;
    esac
    if [[ -n ${event:-} ]]; then
        reached=$(grep -oE 'iteration +[0-9]+/' "$OUT/log.txt" | tail -n 1 | tr -dc 0-9 || true)
        latest=$(cat "$(flag_value --save "" "${FLAGS[@]}")/latest_checkpointed_iteration.txt" 2>/dev/null || echo none)
        say "$event ${reached:+at iteration }${reached:-before the first logged iteration}; checkpoint $latest; $(again) to resume"
        exit "$1"
    fi
    reason=$(grep -m 1 -oE '(megatron[_-]ext|pretrain_[a-z]+\.py): error: .*' "$OUT/log.txt" || true)
    fail "training ended with exit code $1${reason:+: ${reason#*: error: }} (log: $OUT/log.txt)"
}

train() {
    # shellcheck source=examples/llama3/model.env
    source "$HERE/model.env"
    parse_options "$@"
    look_around
    if ! $DRY_RUN; then
        check_data
    fi
    load_size
    choose_processes
    choose_split
    choose_kernels
    choose_data
    FLAGS=("${MODEL[@]}" "${ARCHITECTURE[@]}" "${SPLIT[@]}" "${TRAINING[@]}" "${KERNELS[@]}" "${DATA[@]}"
        --save "$OUT/checkpoints" --load "$OUT/checkpoints" "${EXTRA[@]}")
    check_world
    check_flags
    choose_launch
    choose_environment
    local command=("${LAUNCH[@]}" "$SCRIPT" "${FLAGS[@]}")
    if $DRY_RUN; then
        if [[ -n $HOSTFILE && $DEVICE != unknown ]]; then
            "${command[@]}"
        else
            say "environment: ${ENVIRONMENT[*]}" >&2
            print_command "${command[@]}"
        fi
        return
    fi
    make_data
    if [[ -n $HOSTFILE ]]; then
        say "starts on the hosts of $HOSTFILE"
    else
        say "$NPROC processes on $DEVICE; importing torch and Megatron takes up to a minute"
    fi
    mkdir -p "$OUT" || fail "--out $OUT cannot be created; name a folder that can be written"
    [[ -n $HOSTFILE ]] || announce || return 0
    # The launcher runs in a separate session, so it gets one signal per Ctrl-C, from this script and not also from
    # the terminal. A second signal would kill its job.
    run_command "$OUT/log.txt" ${HOSTFILE:+setsid} "${command[@]}" || explain_failure $?
    if is_tiny && [[ -z $HOSTFILE ]]; then # the launcher has its own last line
        summary
    fi
}
