"""Checks that Megatron-Bridge can run here: its version and its unconditional imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from megatron_ext.errors import UserError
from megatron_ext.upstream import releases
from megatron_ext.version import installed

SUPPORTED = ">=0.6,<0.8"
"""Versions of megatron-bridge that the patches in `megatron_ext/hosts/bridge.py` support."""

# The minor release of megatron-core that each of them was tried with, and needs.
_CORES = {(0, 6): 19, (0, 7): 20}
_PYTHON = (3, 12)
# Imports of `megatron.bridge.training.pretrain`: module to package requirement.
_IMPORTS = {
    "transformer_engine": "transformer-engine[pytorch]",
    "modelopt": "nvidia-modelopt",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "omegaconf": "omegaconf",
    "hydra": "hydra-core",
    "datasets": "datasets",
    "diffusers": "diffusers",
    "transformers": "transformers>=5.8",
}


def problems() -> Iterator[str]:
    """Yield each problem that keeps Bridge from running: found, required, what to install."""
    version = installed("megatron-bridge")  # None of a plain source tree
    release = min(_CORES) if version is None else releases.parse_release(version)
    if release not in _CORES:
        yield (
            f"megatron-bridge {version} is installed, but {SUPPORTED} is supported; pip install "
            f"'megatron-bridge{SUPPORTED}'"
        )
        return
    name = f"megatron-bridge {version or '(sources)'}"
    core, minor = releases.installed_release(), _CORES[release]
    if core is None or core < (0, minor):
        needed = f"megatron-core>=0.{minor},<0.{minor + 1}"
        yield (
            f"{name} needs {needed}, but {releases.core_version() or 'none'} is installed; pip "
            f"install '{needed}'"
        )
    if sys.version_info[:2] < _PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        yield f"{name} needs Python 3.12, but this is {found}; make an environment with Python 3.12"
    missing = [
        module for module in _IMPORTS if module not in sys.modules and find_spec(module) is None
    ]
    if missing:
        needed = " ".join(f"'{_IMPORTS[module]}'" for module in missing)
        yield (
            f"{name} always imports {', '.join(missing)}, but this environment lacks "
            f"{'it' if len(missing) == 1 else 'them'}; pip install {needed}"
        )


def check_installed() -> None:
    """Check Bridge's requirements before an import deep inside it fails.

    Raises:
        UserError: The first problem, in one line.
    """
    for problem in problems():
        raise UserError(problem)
