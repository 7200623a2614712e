#!/usr/bin/env bash
# Run this script on the second machine, with the same flags as run_master.sh on the first.
set -euo pipefail

NODE_RANK=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/run_master.sh" "$@"
