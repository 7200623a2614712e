#!/usr/bin/env bash
# Runs the short tier of the tests (tests/tiers.py), or with --all every test, in an environment of its own
# (.venv) unless one is activated (VIRTUAL_ENV), side by side on all cores. Other arguments go to pytest:
# bash tests/run.sh -k equality -x; with a debugger: -n 0 --pdb
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/common.sh"

tier=(--short) arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        tier=()
    else
        arguments+=("$argument")
    fi
done
prepare_environment test
if [[ -z ${MEGATRON_LM_PATH:-} ]]; then
    say "tests with upstream's own scripts are skipped: set MEGATRON_LM_PATH to a Megatron-LM tree"
fi
cd "$REPO"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MEGATRON_EXT_REQUIRE_NATIVE=1
unset PYTHONDONTWRITEBYTECODE # thousands of processes would compile the package, each for itself
# The tests of a file share what they compare with, so one worker runs them. One more than there are cores:
# ranks often wait for each other. nproc would answer with OMP_NUM_THREADS.
workers=$(($(env -u OMP_NUM_THREADS nproc) + 1))
exec "$PYTHON" -m pytest -n $((workers < 8 ? workers : 8)) --dist loadfile ${tier[@]+"${tier[@]}"} ${arguments[@]+"${arguments[@]}"}
