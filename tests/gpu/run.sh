#!/usr/bin/env bash
# Runs the checks that need an NVIDIA GPU, in the Python environment that is active (or PYTHON). It
# needs torch with CUDA, pytest, and for training megatron-core; nothing is downloaded. The package
# is installed from this tree if its native core is not there yet, which needs pip, a C++ compiler,
# cmake, ninja, pybind11 and scikit-build-core. Several ranks share the first GPU. Arguments go to
# pytest: bash tests/gpu/run.sh -k transport -x
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.path[:0] = ["."]; from tests.gpu.processes import why_no_gpu as why
reason = why(); sys.exit(f"run.sh: needs an NVIDIA GPU: {reason}" if reason else 0)'
if ! "$python" -c 'import megatron_ext.transport._C' 2>/dev/null; then
    echo "run.sh: installs megatron_ext from $PWD, to build its native core"
    MEGATRON_EXT_REQUIRE_NATIVE=1 "$python" -m pip install --quiet --no-index --no-deps \
        --no-build-isolation --editable .
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
"$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
MEGATRON_EXT_REQUIRE_NATIVE=1 exec "$python" -m pytest tests/gpu -m gpu -s -v -p no:cacheprovider "$@"
