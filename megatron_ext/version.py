"""The version of the installed package, which its build takes from the tags of the repository."""

from __future__ import annotations

from importlib import metadata

__all__ = ["__version__"]


def _installed() -> str:
    try:
        return metadata.version("megatron-ext")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0+not.installed"


__version__ = _installed()
