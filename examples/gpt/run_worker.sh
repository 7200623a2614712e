#!/usr/bin/env bash
# The second machine of run_master.sh, with the same flags.
set -euo pipefail

NODE_RANK=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/run_master.sh" "$@"
