# shellcheck shell=bash disable=SC2034
# Functions shared by the example scripts and the test command. This file is sourced and never run.
#
# prepare_environment KIND   finds or creates a Python environment with this package, and sets PYTHON
# detect_device FLAGS...     sets DEVICE (cpu, cuda, musa) and DEVICE_COUNT
# python_reference PREFIX    creates the indexed dataset PREFIX_text_document from Python's manual
# word_pieces PREFIX         creates the dataset PREFIX_text_sentence for BERT, and its tokenizer in PREFIX
# flag_value NAME DEFAULT FLAGS...   prints the last value of the flag NAME
# run_command OUTPUT COMMAND...      runs a training command, prints its short log and writes the full output to a file

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly REPO
readonly ASKED_TORCH=${TORCH_VERSION:-}
readonly TORCH_VERSION=${TORCH_VERSION:-2.13.0}
readonly NEWEST_CORE=0.19.2
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
STEP=0 STEPS=1 # of an installation

say() { printf '%s: %s\n' "$(basename "$0")" "$*"; }

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# Handles Ctrl-C before the training starts: prints one line. `run_command` handles it during the training.
interrupted() {
    [[ -z ${pid:-} ]] || kill "$pid" 2>/dev/null || true
    say "interrupted; run again to continue" >&2
    exit 130
}
trap interrupted INT

# Runs a command in the background, where Ctrl-C is ignored, so that Python ends without a traceback.
apart() {
    local pid status=0
    "$@" &
    pid=$!
    wait "$pid" || status=$?
    return "$status"
}

# --- Python environment ---------------------------------------------------------------------------

# Uses an activated environment (VIRTUAL_ENV) unchanged, because its owner chose its torch. Otherwise
# creates or updates .venv in the repository. KIND is `run`, or `test`, which also installs the test
# tools and fails if the native module cannot be built.
prepare_environment() {
    local kind=$1
    if [[ -n ${VIRTUAL_ENV:-} ]]; then
        PYTHON=$VIRTUAL_ENV/bin/python
        # A container's own prefix, such as /usr, may have no unversioned name.
        [[ -x $PYTHON ]] || PYTHON=$VIRTUAL_ENV/bin/python3
        check_environment "$kind"
        say "uses the environment $VIRTUAL_ENV"
        return
    fi
    PYTHON=$REPO/.venv/bin/python
    mkdir -p "$REPO/.venv"
    # Only one set-up runs at a time. Commands do not inherit the descriptor, because a daemon would keep the lock.
    exec 9>"$REPO/.venv/.lock"
    if command -v flock >/dev/null; then
        flock 9
    fi
    check_choice
    if ! is_current "$kind"; then
        install_environment "$kind" 9>&-
    fi
    exec 9>&-
}

# An existing environment keeps its Python and torch. Fails if PYTHON3 or TORCH_VERSION names a different version.
check_choice() {
    local version='import sys; print("%d.%d" % sys.version_info[:2])' there wanted anew="or make it anew: rm -r $REPO/.venv"
    [[ -x $PYTHON ]] || return 0
    if [[ -n ${PYTHON3:-} ]]; then
        wanted=$(find_python)
        there=$("$PYTHON" -c "$version") wanted=$("$wanted" -c "$version")
        [[ $there == "$wanted" ]] ||
            fail "PYTHON3=$PYTHON3 is Python $wanted, but $REPO/.venv was made with $there; unset PYTHON3, $anew"
    fi
    version='from importlib.metadata import version; print(version("torch").partition("+")[0])'
    if [[ -n $ASKED_TORCH ]] && there=$("$PYTHON" -c "$version" 2>/dev/null); then
        [[ $there == "$ASKED_TORCH" ]] ||
            fail "TORCH_VERSION is $ASKED_TORCH, but $REPO/.venv has torch $there; unset TORCH_VERSION, $anew"
    fi
}

# Succeeds if prepare_environment has nothing to install.
environment_exists() {
    PYTHON=$REPO/.venv/bin/python
    [[ -n ${VIRTUAL_ENV:-} ]] || is_current run
}

check_environment() {
    local kind=$1 missing modules=(torch megatron.core megatron_ext) remedy="pip install -e '${REPO}[upstream]'"
    [[ -x $PYTHON ]] || fail "VIRTUAL_ENV=$VIRTUAL_ENV has no bin/python; activate an environment, or unset it"
    if [[ $kind == test ]]; then
        modules+=(hypothesis pytest pytest_timeout xdist)
        remedy="MEGATRON_EXT_REQUIRE_NATIVE=1 pip install -e '${REPO}[dev]'"
    fi
    missing=$("$PYTHON" - "${modules[@]}" <<'PYTHON'
import sys
from importlib.util import find_spec

def absent(name):
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True

sys.path.remove("") if "" in sys.path else None
print(*(name for name in sys.argv[1:] if absent(name)))
PYTHON
    )
    [[ -z $missing ]] || fail "the environment $VIRTUAL_ENV lacks $missing; run: $remedy (or unset VIRTUAL_ENV, and this script creates an environment)"
}

# A stamp contains the hash of all files that an installation depends on. Python sources are not part of
# it, because the installation is editable.
stamp() { printf '%s/.venv/.installed-%s' "$REPO" "$1"; }

fingerprint() {
    (cd "$REPO" && find pyproject.toml CMakeLists.txt csrc -type f -print0 | LC_ALL=C sort -z |
        xargs -0 cat && printf '%s' "${MEGATRON_CORE:-} $REPO") | cksum # a copied .venv has the files of its own clone
}

is_current() {
    [[ -x $PYTHON && -f $(stamp "$1") && $(<"$(stamp "$1")") == "$(fingerprint)" ]]
}

install_environment() {
    local kind=$1 base log=$REPO/.venv/install.log target="${REPO}[upstream]" native=
    base=$(find_python)
    rm -f "$(stamp run)" "$(stamp test)"
    if [[ $kind == test ]]; then
        check_compiler "$base"
    fi
    say "sets up $REPO/.venv with $base, Python $("$base" -V | cut -d ' ' -f 2) (log: $log)"
    [[ -x $PYTHON ]] || "$base" -m venv "$REPO/.venv" || fail "cannot create a virtual environment with $base"
    : >"$log"
    STEP=0 STEPS=1
    comes_with_package "$PYTHON" || STEPS=$((STEPS + 1))
    if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
        STEPS=$((STEPS + 1))
        install_torch "$log"
    fi
    install_core "$log"
    if [[ $kind == test ]]; then
        target="${REPO}[dev]"
        native=1
    fi
    MEGATRON_EXT_REQUIRE_NATIVE=${native:-${MEGATRON_EXT_REQUIRE_NATIVE:-}} \
        installing "this package, whose native module is compiled, and what Megatron needs" \
        "$log" pip_install --editable "$target" || installation_failed "$log"
    fingerprint >"$(stamp run)"
    if [[ $kind == test ]]; then
        fingerprint >"$(stamp test)"
    fi
}

# Installs the release that MEGATRON_CORE names, or the newest. From 0.17 on, wheels contain Megatron's training
# loop. Wheels for Python 3.11 exist but require 3.12, only because 3.11 has no typing.override.
install_core() {
    local log=$1 version=${MEGATRON_CORE:-$NEWEST_CORE} flags=()
    ! comes_with_package "$PYTHON" || return 0
    if [[ $version != 0.16.* ]] && is_311 "$PYTHON"; then
        say "installs megatron-core $version although this is Python 3.11 (pip's --ignore-requires-python), in this environment only"
        # Without dependencies, which pip would also select for a later Python. The next step installs them.
        flags=(--ignore-requires-python --no-deps)
    fi
    installing "megatron-core $version" "$log" \
        pip_install "${flags[@]}" "megatron-core==$version" || installation_failed "$log"
    ! is_311 "$PYTHON" || printf '%s\n' \
        'import typing, typing_extensions; typing.override = typing_extensions.override' \
        >"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/typing_override.pth"
}

is_311() { [[ $("$1" -c 'import sys; print(sys.version_info[:2] == (3, 11))') == True ]]; }

# Succeeds if the release is the newest for this Python. pip then installs it with this package.
comes_with_package() { [[ -z ${MEGATRON_CORE:-} ]] && ! is_311 "$1"; }

# Checks for the compiler and headers that the native module needs. The package index provides CMake.
check_compiler() {
    local header
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
        fail "the native module needs a C++ compiler (Debian: apt-get install g++)"
    header=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
    [[ -f $header ]] ||
        fail "the native module needs Python's headers, but $header is missing (Debian: apt-get install python3-dev)"
}

# Compiling all of torch's bytecode takes a minute, so modules are compiled when they are imported.
pip_install() { "$PYTHON" -m pip install --no-compile "$@"; }

# The wheel for machines without a GPU is a tenth of the size. PyTorch's index and some mirrors provide it, but
# PyPI does not. If neither can be reached, the wheel for GPUs also runs on a CPU.
install_torch() {
    local log=$1
    if has_nvidia_gpu; then
        installing "torch $TORCH_VERSION for the GPU of this machine (about 3 GB)" \
            "$log" pip_install "torch==$TORCH_VERSION" || installation_failed "$log"
    elif command -v mthreads-gmi >/dev/null; then
        fail "this machine has a Moore Threads GPU: activate its vendor's environment (torch, torch_musa), install this package into it with pip install -e $REPO, and start again"
    else
        installing "torch $TORCH_VERSION for the CPU (about 200 MB)" \
            "$log" pip_install "torch==$TORCH_VERSION+cpu" ||
            logged "$log" pip_install "torch==$TORCH_VERSION+cpu" --extra-index-url "$TORCH_CPU_INDEX" ||
            install_gpu_torch "$log" || installation_failed "$log"
    fi
}

install_gpu_torch() {
    STEP=$((STEP - 1)) # in place of the build for the CPU
    installing "torch $TORCH_VERSION for GPUs, because no CPU build is to be had (about 3 GB)" \
        "$1" pip_install "torch==$TORCH_VERSION"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# Prints the newest Python that can create environments, from PATH or from the folders of pyenv, uv and conda. A
# Python with headers, which the native module needs, is preferred.
find_python() {
    local needs candidate
    for needs in 'sysconfig; open(sysconfig.get_paths()["include"] + "/Python.h")' sys; do
        for candidate in ${PYTHON3:-$(known_pythons)}; do
            if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null &&
                "$candidate" -c "import $needs" 2>/dev/null; then
                "$candidate" -c 'import sys; print(sys.executable)'
                return
            fi
        done
    done
    fail "found no Python >= 3.10 that can make virtual environments (tried ${PYTHON3:-python3.14 ... python3.10, python3}); install one (Debian: apt-get install python3 python3-venv) or name it: PYTHON3=/path/to/python3"
}

known_pythons() {
    local minor home
    for minor in 14 13 12 11 10; do
        printf 'python3.%s\n' "$minor"
        for home in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}" \
            "${CONDA_PREFIX:-$HOME/miniconda3}/envs"; do
            compgen -G "$home/*/bin/python3.$minor" || true
        done
    done
    printf 'python3\n'
}

logged() {
    local log=$1
    shift
    printf '+ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1
}

# Runs a command like `logged`, and shows the package, the elapsed time, the installed size and pip's current step,
# every second on a terminal and every 15 seconds in a log.
installing() {
    local what=$1 log=$2 pid status=0 every=15 end=$'\n' start=$SECONDS
    shift
    [[ ! -t 1 ]] || every=1 end=$'\e[K\r'
    ((STEP += 1)) || true
    say "step $STEP of $STEPS: installs $what"
    logged "$@" &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if (((SECONDS - start) % every == 0)) && kill -0 "$pid" 2>/dev/null; then
            printf '%s: %d s, %d MB in the environment; %.60s%s' "$(basename "$0")" $((SECONDS - start)) \
                "$(du -sm "$REPO/.venv" 2>/dev/null | cut -f 1)" "$(tail -n 1 "$log" | tr -d '\r' | sed 's/^ *//')" "$end"
        fi
    done
    wait "$pid" || status=$?
    return "$status"
}

installation_failed() {
    tail -n 25 "$1" >&2
    fail "the installation failed; the end of $1 is above"
}

# --- Device, data, launch -------------------------------------------------------------------------

detect_device() {
    local found
    if [[ ${MEGATRON_EXT_DEVICE:-} == cpu ]]; then
        DEVICE=cpu DEVICE_COUNT=0 # nothing to look for
        return
    fi
    found=$("$PYTHON" - "$(basename "$0")" "$@" <<'PYTHON'
import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the script without a traceback

from megatron_ext import devices
from megatron_ext.errors import UserError

script, *words = sys.argv[1:]
try:
    if devices.requested(words) == "auto" and not devices.count_devices() and not os.path.exists("/dev/dxg"):
        print("cpu 0")  # no driver lists a device, so torch, which takes seconds to import, would find none
        sys.exit()
    print(f"{script}: looks for devices that torch can use", file=sys.stderr, flush=True)
    import torch

    name = devices.current().name
except UserError as error:
    sys.exit(str(error))
print(name, 0 if name == "cpu" else getattr(torch, name).device_count())
PYTHON
    ) || fail "no usable device"
    read -r DEVICE DEVICE_COUNT <<<"$found"
}

python_reference() {
    local prefix=$1
    [[ ! -f ${prefix}_text_document.idx ]] || return 0
    corpus "$prefix"
    tokenize "$prefix" --append-eod
}

word_pieces() {
    local prefix=$1
    [[ ! -f ${prefix}_text_sentence.idx ]] || return 0
    corpus "$prefix"
    apart "$PYTHON" "$REPO/examples/data/word_pieces.py" "$prefix.jsonl" "$prefix"
    tokenize "$prefix" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$prefix" --split-sentences
}

tokenize() {
    say "tokenizes $1.jsonl"
    PYTHONWARNINGS=ignore apart "$PYTHON" "$REPO/examples/data/tokenize_text.py" "$1.jsonl" --output-prefix "$1" "${@:2}"
}

corpus() {
    mkdir -p "$(dirname "$1")"
    say "creates training data from Python's language reference"
    apart "$PYTHON" "$REPO/examples/data/python_reference.py" "$1.jsonl"
}

flag_value() {
    local name=$1 value=$2
    shift 2
    while (($# > 0)); do
        if [[ $1 == "$name" && $# -gt 1 ]]; then
            value=$2
        elif [[ $1 == "$name="* ]]; then
            value=${1#*=}
        fi
        shift
    done
    printf '%s\n' "$value"
}

# Prints a command with one flag per line, so that it can be pasted into a shell.
print_command() {
    local word line=
    for word in "$@"; do
        if [[ $word == --* && -n $line ]]; then
            printf '%s \\\n    ' "$line"
            line=
        fi
        if [[ ! $word =~ ^[A-Za-z0-9_./,:=+@%-]+$ ]]; then
            printf -v word '%q' "$word"
        fi
        line+=${line:+ }$word
    done
    printf '%s\n' "$line"
}

# Prints the short log of a training command, or its full output with RAW=true, and writes the full output to a file.
# Forwards termination signals to the command, which ends its processes. The script then continues with the exit
# code of the command, with 130 after Ctrl-C, or with 128 + the signal if torchrun turned SIGTERM or SIGHUP into a 1.
run_command() {
    local output=$1 pid view_pid status interrupted=1 stopped=false signal_code=0
    shift
    exec 8> >(exec "${PYTHON:-python3}" "$REPO/megatron_ext/upstream/person_view.py" --log "$output" $(${RAW:-false} && echo --raw))
    view_pid=$!
    "$@" >&8 2>&1 8>&- &
    pid=$!
    exec 8>&-
    trap 'interrupted=1 signal_code=143; kill -TERM "$pid" 2>/dev/null || true' TERM
    trap 'interrupted=1 signal_code=129; kill -TERM "$pid" 2>/dev/null || true' HUP
    trap 'interrupted=1 stopped=true; kill -INT "$view_pid" 2>/dev/null || true; kill -TERM "$pid" 2>/dev/null || true' INT
    while ((interrupted)); do # by a signal, and not by the end of the command
        interrupted=0 status=0
        wait "$pid" || status=$?
    done
    trap - TERM HUP
    trap interrupted INT
    wait "$view_pid" || true
    if $stopped; then
        return 130
    fi
    if ((status == 1 && signal_code)); then
        return "$signal_code"
    fi
    return "$status"
}
