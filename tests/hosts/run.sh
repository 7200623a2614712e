#!/usr/bin/env bash
# Trains with Megatron-Bridge from the package index on four CPU ranks, under its own schedule and ours.
#
#   bash tests/hosts/run.sh [PYTEST OPTION...]
#
# MEGATRON_BRIDGE_PYTHON=PATH  an environment that is there already: with megatron-bridge, torch and pytest. Otherwise
#                              one is made in BRIDGE_DIR (default: .venv-bridge) with python3.12: 7 GB.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
BRIDGE_DIR=${BRIDGE_DIR:-.venv-bridge}
PYTHON=${MEGATRON_BRIDGE_PYTHON:-$BRIDGE_DIR/bin/python}

if [[ -z ${MEGATRON_BRIDGE_PYTHON:-} && ! -f $BRIDGE_DIR/.complete ]]; then
    python3.12 -m venv "$BRIDGE_DIR"
    # Editable: the package of this folder, which the tests are beside, finds its native module no other way.
    MEGATRON_EXT_REQUIRE_NATIVE=1 "$PYTHON" -m pip install --quiet "megatron-core>=0.19,<0.20" --editable ".[upstream]" \
        pytest pytest-timeout hypothesis
    # Bridge names packages that need a GPU, or a newer C library: it comes alone, with what it imports on a CPU.
    "$PYTHON" -m pip install --quiet --no-deps "megatron-bridge>=0.6,<0.7"
    "$PYTHON" -m pip install --quiet "transformers>=5.8,<5.12" omegaconf "hydra-core>=1.3.4,<1.4" datasets peft accelerate \
        diffusers torchvision nvidia-modelopt megatron-energon multi-storage-client
    touch "$BRIDGE_DIR/.complete"
fi

exec env MEGATRON_EXT_DEVICE=cpu OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" \
    "$PYTHON" -m pytest -rP tests/hosts "$@"
