"""Versions of installed packages, and a hash of this package's files."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path


def installed(distribution: str) -> str | None:
    """Return a distribution's version without importing it, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def code_hash() -> str:
    """Return a short hash of this package's files, because two checkouts may share a version."""
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


__version__ = installed("megatron-ext") or "0+not.installed"  # a checkout on PYTHONPATH
