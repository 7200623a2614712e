#!/usr/bin/env bash
# Trains a Llama 3; see README.md beside this file, or --help.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/train.sh
source "$HERE/../train.sh"

# In one line with its exit, so that editing this file does not disturb a run.
train "$@"; exit
