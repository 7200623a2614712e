"""Checks that Megatron-Bridge can run in this environment: its version and required packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from megatron_ext.errors import UserError
from megatron_ext.upstream import releases
from megatron_ext.version import installed

SUPPORTED = ">=0.6,<0.8"
"""Versions of megatron-bridge that the patches in `megatron_ext/hosts/bridge.py` support."""

# Minor release of Bridge -> minor release of megatron-core that it needs and was tested with.
_CORES = {(0, 6): 19, (0, 7): 20}
_PYTHON = (3, 12)
# Modules that `megatron.bridge.training.pretrain` always imports -> the package to install.
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
    """Yield one line for each problem that keeps Bridge from running, with its remedy."""
    # A plain source tree has no version. Accept it, and hold it to the oldest requirements.
    version = installed("megatron-bridge")
    release: tuple[int, int] | None = min(_CORES)
    if version is not None:
        release = releases.parse_release(version)
    # The other requirements are only known for supported versions.
    if release not in _CORES:
        yield (
            f"megatron-bridge {version} is installed, but {SUPPORTED} is supported; pip install "
            f"'megatron-bridge{SUPPORTED}'"
        )
        return
    name = f"megatron-bridge {version or '(sources)'}"
    core = releases.installed_release()
    core_minor = _CORES[release]
    if core is None or core < (0, core_minor):
        requirement = f"megatron-core>=0.{core_minor},<0.{core_minor + 1}"
        yield (
            f"{name} needs {requirement}, but {releases.core_version() or 'none'} is installed; "
            f"pip install '{requirement}'"
        )
    major, minor = sys.version_info[:2]
    if (major, minor) < _PYTHON:
        yield (
            f"{name} needs Python 3.12, but this is {major}.{minor}; create an environment with "
            "Python 3.12"
        )
    missing_modules = []
    for module in _IMPORTS:
        # Tests, and programs without a GPU, put stand-ins without a spec into sys.modules, and
        # `find_spec` raises for these.
        if module not in sys.modules and find_spec(module) is None:
            missing_modules.append(module)
    if missing_modules:
        requirements = " ".join(f"'{_IMPORTS[module]}'" for module in missing_modules)
        pronoun = "it" if len(missing_modules) == 1 else "them"
        yield (
            f"{name} always imports {', '.join(missing_modules)}, but this environment lacks "
            f"{pronoun}; pip install {requirements}"
        )


def check_installed() -> None:
    """Check Bridge's requirements, before one of its nested imports fails with a traceback.

    Raises:
        UserError: A requirement is not met; reports the first problem in one line.
    """
    # One problem is enough for an error. `megatron-ext doctor` lists all of them.
    for problem in problems():
        raise UserError(problem)
