"""Checks of what is installed: versions, the patches and their targets, the native core, a device.

These import torch and Megatron, which takes seconds.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from megatron_ext import devices
from megatron_ext.config.hosting import preflight
from megatron_ext.errors import MegatronExtError
from megatron_ext.tools.doctor.finding import Finding, fail, ok, warn
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from megatron_ext.version import __version__, code_hash, installed

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = [
    "check_bridge",
    "check_device",
    "check_native",
    "check_patches",
    "check_requirements",
    "check_training",
    "check_tree",
    "check_versions",
]

_FOR_DEVELOPERS = "dev"
"""The extra of this package whose tools need not fit what a user has installed."""


def check_versions() -> Iterator[Finding]:
    """Compare Python, torch and megatron-core with what this package supports."""
    yield ok("megatron_ext", f"{__version__}, files {code_hash()}")
    python = ".".join(map(str, sys.version_info[:3]))
    yield ok("Python", python)
    torch = installed("torch") or "not installed"
    if _release(torch) >= (2, 7):
        yield ok("torch", torch)
    else:
        yield fail("torch", torch, "install torch >= 2.7")
    yield _check_core()


def _check_core() -> Finding:
    """Check the installed release of Megatron, and whether it supports this Python."""
    name, supported = "megatron-core", releases.SUPPORTED
    try:
        releases.check_core()
    except MegatronExtError as error:
        return fail(name, str(error).removeprefix(f"{name}: "), "")
    core, release = releases.core_version(), releases.installed_release()
    assert release is not None
    # The examples' environment fills in the one thing that wheels for 3.11 lack.
    stands_in = sys.version_info[:2] == (3, 11) and hasattr(typing, "override")
    if sys.version_info[:2] < releases.oldest_python(release) and not stands_in:
        needed = ".".join(map(str, releases.oldest_python(release)))
        remedy = f"use Python {needed}, or pip install 'megatron-core>=0.16,<0.17'"
        return fail(name, f"{core}, which needs Python {needed} or later", remedy)
    if releases.is_newer_than_known(release):
        shown = f"{core} is newer than this package knows ({supported})"
        return warn(name, shown, "`megatron-ext patches check` tells whether it fits")
    return ok(name, f"{core} (tested with {releases.reference().version}; {supported})")


def check_requirements() -> Iterator[Finding]:
    """Compare installed packages with the requirements of this package and of megatron-core.

    Packages that fit yield nothing; torch and megatron-core have separate checks.
    """
    from packaging.requirements import Requirement  # torch and megatron-core need it too

    for package in ("megatron-ext", "megatron-core"):
        try:
            extras = _extras(package) if package == "megatron-ext" else ()
            asked = [Requirement(line) for line in metadata.requires(package) or []]
        except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
            continue
        for one in asked:
            if one.name not in {"torch", "megatron-core"}:
                yield from _misfit(package, one, extras)


def _extras(package: str) -> tuple[str, ...]:
    """Return the extras for users: what they name may be absent, but has to fit if it is there."""
    named = metadata.metadata(package).get_all("Provides-Extra") or []
    return tuple(name for name in named if name != _FOR_DEVELOPERS)


def _misfit(package: str, asked: Requirement, extras: tuple[str, ...]) -> Iterator[Finding]:
    """Yield a finding if a requirement is missing or does not fit."""
    from packaging.version import Version

    marker = asked.marker
    needed = marker is None or marker.evaluate({"extra": ""})
    if not needed and not any(marker and marker.evaluate({"extra": extra}) for extra in extras):
        return
    remedy = f"pip install '{asked.name}{asked.specifier}'"
    try:
        found = metadata.version(asked.name)
    except metadata.PackageNotFoundError:
        if needed:
            yield fail(asked.name, f"not installed, {package} needs it", remedy)
        return
    # A vendor's build of a release, like 2.7.0a0+git, counts as that release.
    if not asked.specifier.contains(Version(found).base_version):
        yield warn(asked.name, f"{found}, {package} asks for {asked.specifier}", remedy)


def _release(version: str) -> tuple[int, ...]:
    numbers = version.partition("+")[0].split(".")[:3]
    return tuple(int(number) for number in numbers if number.isdigit())


def check_bridge() -> Iterator[Finding]:
    """Say whether Megatron-Bridge can be used, if it is here."""
    from megatron_ext.hosts import bridge_requirements

    version = bridge_requirements.bridge_version()
    if version is None:
        return
    name, problems = "megatron-bridge", list(bridge_requirements.problems())
    for problem in problems:
        found, _, remedy = problem.rpartition("; ")
        yield warn(name, found, remedy)
    if not problems:
        yield ok(name, f"{version} ({bridge_requirements.SUPPORTED})")


def check_tree() -> Iterator[Finding]:
    """Compare the Megatron-LM tree with the pin, if there is one."""
    name = "Megatron-LM tree"
    try:
        tree = upstream.find_tree()
        if tree is None:
            remedy = "for upstream's own scripts run `megatron-ext upstream fetch`"
            stands_in = "megatron.training of the wheel is used"
            if not releases.has_training():
                stands_in = f"megatron-core {releases.core_version()} trains with one only"
            yield warn(name, f"none; {stands_in}", remedy)
            return
        upstream.check_tree(tree)
    except MegatronExtError as error:
        yield fail(name, str(error), "")
        return
    status = upstream.tree_status(tree)
    if status.problems:
        shown = "; ".join(status.problems[:3])
        tag = releases.reference().tag
        remedy = f"check out {tag}, or fetch it: `megatron-ext upstream fetch`"
        yield warn(name, f"{tree}: {shown}", remedy)
    else:
        yield ok(name, f"{tree}, version {status.version}")


def check_patches() -> Iterator[Finding]:
    """Compare every target of a patch with the Megatron that it was written for."""
    from megatron_ext.patches import listing
    from megatron_ext.patches.registry import REGISTRY

    name = "patches"
    try:
        releases.check_core()
    except MegatronExtError:
        return  # `check_versions` has reported it
    try:
        absent = listing.import_targets()
    except (ImportError, MegatronExtError) as error:
        yield fail(name, f"Megatron cannot be imported: {error}", "install megatron-core and torch")
        return
    rows = REGISTRY.rows()
    problems = listing.problems(rows)
    tested = releases.reference().version
    for problem in problems:
        yield fail(name, problem, f"pip install megatron-core=={tested}")
    if problems:
        return
    rows = [row for row in rows if row.state != "other release"]
    pending = sum(row.state == "pending" for row in rows)
    note = f"; {pending} belong to modules that this install lacks: {', '.join(absent)}"
    shown = f"{len(rows) - pending} of {len(rows)} patch targets verified"
    yield ok(name, shown + (note if absent else ""))


def check_native() -> Iterator[Finding]:
    """Try to load the native core of the transport."""
    from megatron_ext.errors import TransportError
    from megatron_ext.transport.native import require_native

    try:
        module = require_native()
    except TransportError as error:
        found, _, remedy = str(error).partition(". ")
        yield warn("native core", found, remedy.rstrip("."))
    else:
        yield ok("native core", str(module.__file__))


def check_device() -> Iterator[Finding]:
    """Report the device backend that a run would use here."""
    from megatron_ext.devices import count_devices

    try:
        device = devices.current()
    except MegatronExtError as error:
        yield fail("device", str(error), "")
        return
    count = count_devices()
    collectives = f"{device.name}, collectives by {device.distributed_backend}"
    if device.name != "cpu":
        yield ok("device", f"{collectives}, {count} devices")
    elif devices.requested() != "auto":
        yield ok("device", f"{collectives}, as requested")
    else:
        yield _unused(count) or ok("device", f"{collectives}, no accelerator is needed")


def _unused(count: int) -> Finding | None:
    """Explain why training does not use an accelerator that exists or that torch was built for.

    Args:
        count: Devices that the drivers show.
    """
    from megatron_ext.devices.cuda import why_idle

    reason = why_idle()
    if reason is not None:
        remedy = (
            "nothing is wrong on a machine without a GPU (MEGATRON_EXT_DEVICE=cpu says so); on "
        )
        remedy += "one with a GPU install NVIDIA's driver, until nvidia-smi shows it"
        shown = f" ({count} in /dev)" if count else ""
        return warn("device", f"cpu, with a CUDA build of torch: {reason}{shown}", remedy)
    if count:
        found = f"cpu, though the drivers show {count} devices"
        return warn("device", found, "install the build of torch for them")
    return None


def check_training(words: Sequence[str]) -> Iterator[Finding]:
    """Check the flags of a training: what its schedule takes, changes and refuses.

    Args:
        words: Its command line, with or without the script, after `--`.
    """
    flags = [word for word in words if word != "--"]
    found = preflight(flags[1:] if flags and flags[0].endswith(".py") else flags)
    for refusal in found.refusals:
        yield fail("training", refusal.reason, refusal.remedy)
    for line in (*found.changes, *found.notices):
        yield ok("training", line)
    if found.accepted:
        own = "Megatron's own schedule"
        yield ok("training", f"{found.pipeline.name if found.pipeline else own} takes these flags")
