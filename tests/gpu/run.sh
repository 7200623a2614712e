#!/usr/bin/env bash
# Runs the checks that need an NVIDIA GPU, in the Python environment that is active (or PYTHON), and
# prints one table. Several ranks share the first GPU. A check that would be skipped fails. Then
# compare.sh measures pipelines of four ranks on it.
#
#     bash tests/gpu/run.sh [--emulated] [--wheels DIR] [ARGUMENTS OF PYTEST]
#
#   --emulated    on the emulated device of the tests, which runs behind its host as a GPU does: the
#                 same checks with little work, so that the first run on a GPU is not their first
#   --wheels DIR  first installs all wheels of DIR, without dependencies and without an index. Fill it
#                 where there is one:
#                     pip download --no-deps -d DIR megatron-core wrapt pytest pytest-timeout iniconfig \
#                         pluggy pygments pybind11 scikit-build-core setuptools-scm vcs-versioning
#
# It needs torch with CUDA, pytest, pytest-timeout and megatron-core; nothing is downloaded. The package is installed
# from this tree if its native core is not there yet, which needs pip, a C++ compiler, cmake, ninja
# and the last four of these wheels. With pytest-xdist, `-n 6` shortens it on 16 cores or more;
# `-k how_fast` alone then measures bandwidth undisturbed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3}
export MEGATRON_EXT_REQUIRE_NATIVE=1 MEGATRON_EXT_GPU_CHECKS=cuda
while (($#)); do
    case $1 in
        --emulated)
            export MEGATRON_EXT_GPU_CHECKS=emulated
            shift
            ;;
        --wheels)
            wheels=("${2:?run.sh: --wheels needs a folder}"/*.whl)
            [[ -e ${wheels[0]} ]] || { echo "run.sh: there is no wheel in $2" >&2 && exit 2; }
            "$python" -m pip install --quiet --no-index --no-deps "${wheels[@]}"
            shift 2
            ;;
        *) break ;;
    esac
done

"$python" -c 'import importlib.util as found, sys
absent = " and ".join(name for name in ("torch", "megatron", "pytest", "pytest_timeout") if not found.find_spec(name))
remedy = "activate an environment with pip install -e .[dev], or name its Python: PYTHON=PATH"
sys.exit(f"run.sh: {sys.executable} lacks {absent}; {remedy}" if absent else 0)'
"$python" -c 'import sys; sys.path[:0] = ["."]; from tests.gpu.processes import why_no_gpu as why
reason = why(); sys.exit(f"run.sh: needs an NVIDIA GPU: {reason}" if reason else 0)'
if ! "$python" -c 'import megatron_ext.transport._C' 2>/dev/null; then
    echo "run.sh: installs megatron_ext from $PWD, to build its native core"
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
fi
if [[ $MEGATRON_EXT_GPU_CHECKS == cuda ]]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
    "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
fi
# A case may wait for others that need the memory of the GPU alone.
code=0
"$python" -m pytest tests/gpu -m gpu -v -p no:cacheprovider -o timeout=1200 "$@" || code=$?
PYTHON=$python bash tests/gpu/compare.sh || code=$((code ? code : $?))
exit "$code"
