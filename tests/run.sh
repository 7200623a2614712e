#!/usr/bin/env bash
# Runs every test, in an environment of its own (.venv) unless one is activated (VIRTUAL_ENV).
# Arguments go to pytest: bash tests/run.sh -k preprocess -x
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/common.sh"

prepare_environment test
if [[ -z ${MEGATRON_LM_PATH:-} ]]; then
    say "tests with upstream's own scripts are skipped: set MEGATRON_LM_PATH to a Megatron-LM tree"
fi
cd "$REPO"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MEGATRON_EXT_REQUIRE_NATIVE=1
exec "$PYTHON" -m pytest "$@"
