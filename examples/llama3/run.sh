#!/usr/bin/env bash
# Trains Llama 3. See README.md in this folder, or --help.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=examples/train.sh
source "$HERE/../train.sh"

# `exit` is on the same line, so that editing this file does not disturb a running script.
train "$@"; exit
