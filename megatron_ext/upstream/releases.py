"""The Megatron releases that this package supports, and the installed release.

This module reads files and does not import Megatron. Versions decide which rows of the patch tables
apply, which fingerprints are compared, and what is rejected before anything starts. All later code
inspects signatures instead of versions (`megatron_ext/upstream/signatures.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from megatron_ext.errors import UpstreamMismatch, UserError

SUPPORTED = ">=0.16.0,<0.21"
"""The range in `pyproject.toml`."""

Release = tuple[int, int]
"""Major and minor version."""


class Reference(NamedTuple):
    """The versions that a minor release is tested with."""

    version: str
    """Version of the wheel."""
    tag: str
    """Megatron-LM tag, for its scripts. The public mirror has no tag for 0.19.2, but its
    `megatron.training` is the same as in 0.19.0."""
    commit: str
    """Commit of the tag."""


REFERENCES: dict[Release, Reference] = {
    (0, 16): Reference(
        "0.16.1",
        "core_v0.16.1",
        "55ac7082517c3878ae653c07c09c534b8aed49f6",
    ),
    (0, 17): Reference(
        "0.17.1",
        "core_v0.17.1",
        "266f1c97dca477ca8b92c16087506da2000b0b84",
    ),
    (0, 18): Reference(
        "0.18.2",
        "core_v0.18.2",
        "571370c829ca768fe37244f4e2e7f28d8accc4ab",
    ),
    (0, 19): Reference(
        "0.19.2",
        "core_v0.19.0",
        "5be9626709af2722333bf54797c954c09edeada3",
    ),
    (0, 20): Reference(
        "0.20.0",
        "core_v0.20.0",
        "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    ),
}
"""Minor release -> its reference, oldest first."""

_OLDEST = min(REFERENCES)
_NEWEST = max(REFERENCES)
_TRAINING_SINCE: Release = (0, 17)


def parse_release(version: str) -> Release | None:
    """Return a version's major and minor numbers, or None if it has no such numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return None
    major, minor = match.groups()
    return int(major), int(minor)


def written_version(core: Path) -> str | None:
    """Return the version in the sources of `megatron/core`, without importing them."""
    try:
        text = (core / "package_info.py").read_text()
    except OSError:
        return None
    numbers = []
    for key in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"^{key}\s*=\s*(\d+)", text, re.M)
        if match is None:
            return None
        numbers.append(match[1])
    return ".".join(numbers)


@lru_cache(maxsize=1)
def installed_core() -> Path | None:
    """Return the `megatron/core` directory of the installed distribution, or None."""
    try:
        distribution = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    located = distribution.locate_file("megatron/core")
    core = Path(str(located))
    about = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not core.is_dir() and about.get("dir_info", {}).get("editable"):
        # `pip install -e` on a tree installs an import finder instead of the files.
        url_path = urlsplit(about["url"]).path
        tree = Path(url2pathname(url_path))
        core = tree / "megatron" / "core"
    is_readable = os.access(core / "__init__.py", os.R_OK)
    return core if is_readable else None


def core_version() -> str | None:
    """Return the version of the `megatron.core` that is, or would be, imported, or None.

    The local part of the version is removed. On import, megatron.core appends the commit of any git
    repository that contains its files, such as a checkout with the environment inside.
    """
    # Do not import megatron.core: it would bind names from torch.cuda before our
    # patches are in place.
    info = sys.modules.get("megatron.core.package_info")
    if info is not None:
        return str(info.__version__).partition("+")[0]
    core = installed_core()
    if core is not None:
        places = [core]
    else:
        # Search in import order. An empty entry means the current folder.
        places = [Path(entry or ".") / "megatron" / "core" for entry in sys.path]
    for place in places:
        if version := written_version(place):
            return version
    return None


def installed_release() -> Release | None:
    """Return the release of `core_version()`, or None."""
    return parse_release(core_version() or "")


def reference(release: Release | None = None) -> Reference:
    """Return the reference for a release, by default for the installed release.

    A release without a reference gets the nearest older release's reference, or else the oldest
    one.
    """
    release = release or installed_release() or _OLDEST
    # A release newer than all references is closest to the newest one.
    older = [minor for minor in REFERENCES if minor <= release]
    return REFERENCES[max(older, default=_OLDEST)]


def is_newer_than_known(release: Release | None) -> bool:
    """Return whether a release is newer than all releases that this package was tested with."""
    return release is not None and release > _NEWEST


def has_training() -> bool:
    """Return whether the installed wheel contains `megatron.training`."""
    core = installed_core()
    return core is not None and os.access(
        core.parent / "training" / "__init__.py", os.R_OK
    )


def oldest_python(release: Release) -> tuple[int, int]:
    """Return the oldest Python that a release's wheels support."""
    return (3, 12) if release >= _TRAINING_SINCE else (3, 10)


def check_core() -> None:
    """Reject an unsupported megatron-core before its import.

    A release newer than all references is accepted. When its functions are loaded, they are
    compared with the functions that the patches were written for.

    Raises:
        UserError: megatron-core is not installed, or another package hides it.
        UpstreamMismatch: megatron-core is older than the supported range.
    """
    # NVIDIA's `megatron` is a namespace package without this file. A file here belongs to another
    # package on the package index that is also named `megatron`.
    for entry in sys.path:
        file = Path(entry or ".") / "megatron" / "__init__.py"
        # Do not use Path.is_file(), which raises inside a folder without access permission.
        if os.access(file, os.R_OK):
            package = file.resolve()
            raise UserError(
                f"{package} belongs to the package `megatron` from the package index, which is not "
                "NVIDIA's and hides megatron-core; pip uninstall megatron, then pip install "
                f"--force-reinstall --no-deps 'megatron-core{SUPPORTED}'"
            )
    version = core_version()
    if version is None:
        raise UserError(
            f"megatron-core is not installed; pip install 'megatron-core{SUPPORTED}'"
        )
    release = parse_release(version)
    if release is None or release < _OLDEST:
        raise UpstreamMismatch(
            "megatron-core",
            expected=f"a version {SUPPORTED}",
            actual=f"version {version}",
            installed=version,
            supported=SUPPORTED,
            remedy=f"pip install 'megatron-core{SUPPORTED}'",
        )
