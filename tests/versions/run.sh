#!/usr/bin/env bash
# Trains under every feature on every release of the range and prints a table of losses, which have to be
# those of Megatron's own schedule in the same release.
#
#   bash tests/versions/run.sh [VERSION...]        by default one of each minor release
#
# MEGATRON_LM_PATH_0_19=DIR    upstream's unmodified script of that tree, instead of the wheel's training loop
# PYTHON_0_19=PATH             an environment that is there already: with that megatron-core, torch and pytest.
#                              Otherwise one is made below VERSIONS_DIR (default: .venv-versions), with PYTHON_FOR_0_19
#                              or the first Python on PATH that the release takes
# CASES="zb-h1;disaggregation" only these
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
REPO=$PWD
VERSIONS_DIR=${VERSIONS_DIR:-$REPO/.venv-versions}
# Of the range in megatron_ext/releases.py.
VERSIONS=("$@")
[[ ${#VERSIONS[@]} -gt 0 ]] || VERSIONS=(0.16.1 0.17.1 0.18.2 0.19.2)

say() { printf 'versions: %s\n' "$*"; }

# The first Python on PATH whose version the release takes; nothing if there is none.
find_python() {
    local minor=$1 candidate given
    given=PYTHON_FOR_${minor/./_}
    [[ -z ${!given:-} ]] || { printf '%s' "${!given}"; return; }
    local candidates=(python3.12 python3.13)
    [[ $minor != 0.16 ]] || candidates=(python3.11 python3.10 python3.12)
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c '' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
}

# Sets PYTHON to an environment with this release, or to nothing.
environment() {
    local version=$1 minor=${1%.*} base given
    given=PYTHON_${minor/./_}
    PYTHON=${!given:-}
    [[ -z $PYTHON ]] || return 0
    PYTHON=$VERSIONS_DIR/$version/bin/python
    [[ ! -f $VERSIONS_DIR/$version/.complete ]] || return 0
    base=$(find_python "$minor")
    if [[ -z $base ]]; then
        PYTHON=
        return 0
    fi
    say "makes $VERSIONS_DIR/$version with $base"
    "$base" -m venv "$VERSIONS_DIR/$version"
    "$PYTHON" -m pip install --quiet "megatron-core==$version" "$REPO[upstream]" pytest
    touch "$VERSIONS_DIR/$version/.complete"
}

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
failed=0
files=()
cases=()
[[ -z ${CASES:-} ]] || IFS=';' read -r -a cases <<<"$CASES"
for version in "${VERSIONS[@]}"; do
    environment "$version"
    if [[ -z $PYTHON ]]; then
        minor=${version%.*}
        say "$version is SKIPPED: no Python that it takes is on PATH (from 0.17 on 3.12 or later)," \
            "and PYTHON_FOR_${minor/./_} is not set"
        continue
    fi
    minor=${version%.*}
    tree=MEGATRON_LM_PATH_${minor/./_}
    say "$version with $PYTHON, ${!tree:-without a tree}"
    file=$results/$version.json
    MEGATRON_LM_PATH=${!tree:-} MEGATRON_EXT_DEVICE=${MEGATRON_EXT_DEVICE:-cpu} OMP_NUM_THREADS=1 \
        PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH} \
        "$PYTHON" -m tests.versions.matrix "$file" "${cases[@]+"${cases[@]}"}" || failed=1
    [[ ! -f $file ]] || files+=("$file")
done
if [[ ${#files[@]} -gt 0 ]]; then
    "${PYTHON:-python3}" -m tests.versions.table "${files[@]}" || failed=1
fi
exit $failed
