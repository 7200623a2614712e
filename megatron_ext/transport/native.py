"""Access to the native core, which may be absent.

An installation without a working C++ compiler lacks `megatron_ext.transport._C`. All users of the
core get it here, so its absence is one error with a remedy instead of a bare ImportError.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from megatron_ext.errors import TransportError

_MODULE = "megatron_ext.transport._C"
_REMEDY = (
    "Install a C++17 compiler and the headers of Python (Debian: apt-get install g++ python3-dev), "
    "then install megatron_ext again with MEGATRON_EXT_REQUIRE_NATIVE=1 set, which makes pip stop "
    "with the compiler's message if the build still fails"
)


@functools.cache
def _load() -> ModuleType | ImportError:
    """Return the module, or the error of its import (absent, or built for another system)."""
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        return error


def available() -> bool:
    """Return whether the native core is usable. The first call loads it; no call raises."""
    return isinstance(_load(), ModuleType)


def require_native() -> ModuleType:
    """Return the native core, `megatron_ext.transport._C` (its interface: `_C.pyi`).

    Raises:
        TransportError: The core is not installed or does not load; names a remedy.
    """
    module = _load()
    if isinstance(module, ImportError):
        raise TransportError(
            f"The native module {_MODULE} is not usable: {module}. {_REMEDY}."
        ) from module
    return module
