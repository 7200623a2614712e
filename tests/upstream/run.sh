#!/usr/bin/env bash
# Runs upstream's own unit tests on CPU ranks, from the tree that MEGATRON_LM_PATH names:
#   bash tests/upstream/run.sh [PATTERN...]     files whose path holds a pattern; none means all
#   bash tests/upstream/run.sh --list           what runs, and what does not and why
set -euo pipefail

# shellcheck source=../../examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/common.sh"

prepare_environment test
cd "$REPO"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m tests.upstream.runner "$@"
