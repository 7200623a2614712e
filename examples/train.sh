# shellcheck shell=bash disable=SC2034,SC2154
# Runs a model of the examples: what all their run.sh have in common. Sourced after HERE, the folder of
# the example, is set. That folder's model.env says what the model is:
#
#   TITLE, SCRIPT, DEFAULT_SIZE   what is trained, by which script of Megatron-LM, and at which size
#   ARCHITECTURE                  flags of the model at every size
#   size_NAME                     one function for each size, tiny among them. It sets
#     MODEL, TRAINING, PARALLEL   flags; --pipeline-model-parallel-size follows from PIPELINE
#     PIPELINE                    stages of the pipeline
#     STAGES                      flags that cut the layers unevenly, or into virtual stages
#     EXPERT_PARALLEL             ranks among which the experts of a layer are divided
#     TOKENIZER, VOCAB_SIZE       flags of the published tokenizer; the size stands in with --mock-data
#     CORPUS                      training data of the tiny size: bytes, or word_pieces
#   MUSA_ENVIRONMENT              variables (NAME=VALUE) for Moore Threads GPUs

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Flags that the published models share.
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
# And their small versions. Each run stops, and saves, at the next multiple of the exit interval. A run
# that resumes may be given other numbers of iterations than the one before it: the learning rates on the
# command line count. The flag about resharding lets it go on under any other pipeline schedule.
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

  --tiny           a small $TITLE on Python's manual, in minutes, also without a GPU; run again to resume
  --size SIZE      one of: $(sizes) (default: $DEFAULT_SIZE)
  --hostfile FILE  on all hosts of the file (megatron-ext launch); else on this machine
  --nproc N        processes on each node, as NPROC (default: one for each GPU; --tiny: at most $TINY_NPROC)
  --dry-run        print the command instead of running it
  --out DIR        checkpoints and logs (default: examples/$EXAMPLE/out/SIZE)
  --raw            show every line of Megatron's, not one for each logged step

Any other flag goes to Megatron and wins over the script's own, for example
--pipeline-schedule NAME (megatron-ext plan compares them), --pipeline-transport NAME or
--device-backend NAME. A published size needs --data-path PREFIX (examples/data/tokenize_text.py makes it) and
the flags of its tokenizer, or --mock-data.

Environment: NPROC (processes on each node), MEGATRON_EXT_DEVICE (auto, cuda, musa, cpu),
MEGATRON_LM_PATH (a Megatron-LM tree), VIRTUAL_ENV (an environment to use as it is), PYTHON3 (what .venv is made with),
TORCH_VERSION, MEGATRON_CORE (its releases);
several nodes without a hostfile: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
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
            --embedded) fail "--embedded was removed; leave it out: Megatron's own loop trains" ;;
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
                # A value of the flag before it; the first word cannot be one.
                ((${#EXTRA[@]} > 0)) || fail "unexpected \"$1\"; flags start with --, see --help"
                EXTRA+=("$1")
                ;;
        esac
        shift
    done
    declare -F "size_$SIZE" >/dev/null || fail "--size $SIZE: there is none of this name; take one of: $(sizes)"
    [[ -z $HOSTFILE || -f $HOSTFILE ]] ||
        fail "--hostfile $HOSTFILE: there is no such file; write one with the address of a node on each line"
    OUT=${OUT:-$HERE/out/$SIZE}
}

# Megatron would get a flag of this script with a letter too many, too few or wrong, and the published size
# would start in place of the tiny one.
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

# Flags that the model's file sets where they matter.
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

# The pipeline schedule that the flags ask for; empty: Megatron's own.
schedule_asked() {
    if given --enable-bitpipe-schedule; then
        printf 'bitpipe\n'
    else
        flag_value --pipeline-schedule "" "${EXTRA[@]}"
    fi
}

# --- Device, processes, kernels -------------------------------------------------------------------

# A dry run installs nothing: without an environment it shows the defaults.
look_around() {
    if $DRY_RUN && ! environment_exists; then
        PYTHON=python3 DEVICE=unknown DEVICE_COUNT=0
        return
    fi
    # Before another release is installed.
    if ! $DRY_RUN && [[ $SCRIPT == pretrain_bert.py && -z ${VIRTUAL_ENV:-} && ! ${MEGATRON_CORE:-$NEWEST_CORE} =~ ^0\.1[67]\. ]]; then
        fail "megatron-core ${MEGATRON_CORE:-$NEWEST_CORE} has no $SCRIPT, releases up to 0.17 and their trees have; start again with MEGATRON_CORE=0.17.1 and MEGATRON_LM_PATH=DIR, a tree of core_v0.17.1"
    fi
    prepare_environment run >&2
    DEVICE=$(flag_value --device-backend "${MEGATRON_EXT_DEVICE:-auto}" "${EXTRA[@]}")
    # Where a launcher starts the job there need not be a GPU; what was named is what its hosts have.
    if [[ -z $HOSTFILE || $DEVICE == auto ]]; then
        detect_device "${EXTRA[@]}"
    fi
}

check_data() {
    if is_tiny; then
        return
    fi
    [[ $DEVICE != cpu || -n $HOSTFILE ]] ||
        fail "the $SIZE model needs accelerators and this machine has none that torch can use; try --tiny, or --dry-run"
    given --data-path || given --mock-data ||
        fail "the $SIZE model needs --data-path PREFIX (examples/data/tokenize_text.py makes it) or --mock-data"
}

# Sets NPROC, processes on this node, and WORLD, on all; WORLD is 0 where the hostfile knows it.
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

# Whether a schedule can run the published cut: Megatron's own, those with one stage on each rank if the cut
# is an uneven one, interleaved if it is one into virtual stages. Where first and last stage are on one rank
# there is nothing to even out.
keeps_cut() {
    case $1 in
        '') ;;
        1f1b | gpipe | zb-h1) [[ ${STAGES[0]-} == --decoder-* ]] ;;
        interleaved) [[ ${STAGES[0]-} == --num-layers-per-virtual-* ]] ;;
        *) return 1 ;;
    esac
}

# Sets SPLIT, the flags that divide the model among the processes.
choose_split() {
    local schedule stages=$PIPELINE experts=$EXPERT_PARALLEL
    schedule=$(schedule_asked)
    if [[ $schedule == bitpipe || $schedule == dualpipe ]] && ((stages < 4)); then
        stages=4 # two mirrored pipelines on the same processes
    fi
    if is_tiny && ((WORLD > 0)); then
        if ((stages == 4 && WORLD % 4 != 0)); then
            fail "--pipeline-schedule $schedule mirrors two pipelines: it needs a multiple of 4 processes, NPROC is $NPROC; take NPROC=4, or zb-v, which takes any even number"
        fi
        stages=$((WORLD % 2 == 0 ? stages : 1))
    fi
    SPLIT=(--pipeline-model-parallel-size "$stages" "${PARALLEL[@]}")
    # Published cuts are for the published number of stages.
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

# One copy of the model, or of its experts, takes a number of processes that the user may not expect.
check_world() {
    local tp pp cp ep etp hosted
    tp=$(flag_value --tensor-model-parallel-size 1 "${FLAGS[@]}")
    pp=$(flag_value --pipeline-model-parallel-size 1 "${FLAGS[@]}")
    cp=$(flag_value --context-parallel-size 1 "${FLAGS[@]}")
    ep=$(flag_value --expert-model-parallel-size 1 "${FLAGS[@]}")
    etp=$(flag_value --expert-tensor-parallel-size "$tp" "${FLAGS[@]}")
    # Counted otherwise, and checked with the flags.
    ! given --forward-backward-disaggregating || return 0
    # Megatron says what is wrong with other values.
    [[ $tp-$pp-$cp-$ep-$etp =~ ^[1-9][0-9]*(-[1-9][0-9]*){4}$ ]] || return 0
    ((WORLD % (tp * pp * cp) == 0)) ||
        fail "one copy of the model takes tensor $tp x pipeline $pp$( ((cp == 1)) || printf ' x context %s' "$cp") = $((tp * pp * cp)) processes, NNODES x NPROC is $WORLD; start a multiple (on several nodes: --hostfile FILE, or NNODES), or lower a size"
    hosted=$pp
    case $(schedule_asked) in
        bitpipe | dualpipe) hosted=$(((pp + 1) / 2)) ;; # two pipelines of half the ranks
    esac
    ((WORLD % (etp * ep * hosted) == 0)) ||
        fail "the experts take tensor $etp x expert $ep x pipeline $hosted = $((etp * ep * hosted)) processes, NNODES x NPROC is $WORLD; start a multiple (on several nodes: --hostfile FILE, or NNODES), or lower --expert-model-parallel-size"
}

# What a job would refuse after a minute of imports. On the hosts of a file the launcher checks it.
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

# Flags for kernels that this environment does not have.
choose_kernels() {
    KERNELS=()
    if [[ $DEVICE == cpu || $DEVICE == unknown ]]; then
        return # the CPU backend sets them itself
    fi
    if ! "$PYTHON" -c 'import transformer_engine' 2>/dev/null; then
        ! given --fp8-format ||
            fail "--fp8-format needs Transformer Engine, which $PYTHON cannot import; install it (on NVIDIA GPUs: pip install -e '.[te]'), or leave the flag out"
        KERNELS=(--transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion)
    fi
    # Apex's, which the output layer needs beside Transformer Engine, too.
    "$PYTHON" -c 'import fused_weight_gradient_mlp_cuda' 2>/dev/null || KERNELS+=(--no-gradient-accumulation-fusion)
}

# --- Data -----------------------------------------------------------------------------------------

choose_data() {
    DATA=()
    if given --mock-data; then
        # Its largest id, which ends documents.
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
    # Upstream has no flag for its byte-level tokenizer. Training never tokenizes, it needs the size of the
    # vocabulary: the bytes, one id for the end of a document, and room up to a multiple of 512.
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

# Sets LAUNCH, the command up to the training script.
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

# Sets ENVIRONMENT: variables that every process gets unless the user has set them.
choose_environment() {
    # Every process would warn of kernels that are not installed and of deprecated calls in Megatron.
    ENVIRONMENT=(CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore)
    if [[ $DEVICE == musa ]]; then
        ENVIRONMENT+=("MUSA_VISIBLE_DEVICES=$(seq -s , 0 $((${NPROC:-$NODE_NPROC} - 1)))"
            MCCL_IB_GID_INDEX=3 # RoCE v2
            "${MUSA_ENVIRONMENT[@]}")
    fi
    local pair name
    for pair in "${ENVIRONMENT[@]}"; do
        name=${pair%%=*}
        if [[ -z ${!name+set} ]]; then
            export "${pair?}"
        fi
    done
}

# Prints what starts the training again from its own checkpoints.
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

# Says where training starts and where it will stop. Returns 1 if there is nothing left to do.
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
        say "nothing to do: trained to --train-iters $total; give a larger one, or --out DIR for a new run"
        return 1
    fi
    local stop=$(((latest / every + 1) * every))
    say "trains to iteration $((stop < total ? stop : total)); $(again) to go on from there"
}

# First and last loss of this run, from Megatron's own log lines.
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

# torchrun ends with a report on every rank; the line before it names what the user can mend.
explain_failure() {
    local reason reached latest
    if (($1 == 130)); then
        reached=$(grep -oE 'iteration +[0-9]+/' "$OUT/log.txt" | tail -n 1 | tr -dc 0-9 || true)
        latest=$(cat "$(flag_value --save "" "${FLAGS[@]}")/latest_checkpointed_iteration.txt" 2>/dev/null || echo none)
        say "interrupted ${reached:+at iteration }${reached:-before the first logged iteration}; checkpoint $latest; $(again) to resume"
        exit 130
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
        say "$NPROC processes on $DEVICE; to import torch and Megatron takes them up to a minute"
    fi
    mkdir -p "$OUT" || fail "--out $OUT cannot be made; name a folder that can be written"
    [[ -n $HOSTFILE ]] || announce || return 0
    # Apart from the terminal the launcher gets one signal for one Ctrl-C, from here. A second one kills its job.
    run_command "$OUT/log.txt" ${HOSTFILE:+setsid} "${command[@]}" || explain_failure $?
    if is_tiny && [[ -z $HOSTFILE ]]; then # the launcher has its own last line
        summary
    fi
}
