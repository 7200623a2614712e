"""Access to the native core, which may be absent.

An installation without a working C++ compiler leaves `megatron_ext.transport._C` out. Everything
that needs it asks here, so that its absence is one error with a remedy, not an ImportError from
somewhere.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from megatron_ext.errors import TransportError

__all__ = ["available", "require_native"]

_MODULE = "megatron_ext.transport._C"
_REMEDY = (
    "Install a C++17 compiler and the headers of Python (Debian: apt-get install g++ python3-dev), "
    "then install megatron_ext again with MEGATRON_EXT_REQUIRE_NATIVE=1 set, which makes pip stop "
    "with the compiler's message if the build still fails"
)


@functools.cache
def _load() -> ModuleType | ImportError:
    """The module, or why it cannot be imported (absent, or built for another system)."""
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        return error


def available() -> bool:
    """Whether the native core can be used; loads it on the first call, never raises."""
    return isinstance(_load(), ModuleType)


def require_native() -> ModuleType:
    """Return the native core, `megatron_ext.transport._C` (see `_C.pyi` for what it holds).

    Raises:
        TransportError: It is not installed, or does not load; the message says what to do.
    """
    module = _load()
    if isinstance(module, ImportError):
        raise TransportError(
            f"The native module {_MODULE} is not usable: {module}. {_REMEDY}."
        ) from module
    return module
