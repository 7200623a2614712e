"""The checks that `doctor` runs: installed packages, this machine, other hosts.

Each check is a generator of diagnoses. The checks import torch and Megatron, which takes a few
seconds.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import typing
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext import devices
from megatron_ext.config import automatic
from megatron_ext.errors import MegatronExtError, TransportError
from megatron_ext.tools.doctor.flight import Diagnosis
from megatron_ext.tools.launch.agents import Agents
from megatron_ext.tools.launch.fitness import MIN_SHARED_BYTES, SHARED_MEMORY
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from megatron_ext.version import __version__, code_hash, installed

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.tools.launch.plan import JobPlan

_MIN_LOCKED_BYTES = 1 << 30
_MIN_OPEN_FILES = 1024
"""The usual limit for a process. With a lower limit, gloo may fail to open its connections, which
makes the rank fail."""
_GIB = 1 << 30


def check_versions() -> Iterator[Diagnosis]:
    """Compare Python, torch and megatron-core with the versions that this package supports."""
    from packaging.version import Version

    yield Diagnosis("OK", "megatron_ext", f"{__version__}, files {code_hash()}")
    python = ".".join(map(str, sys.version_info[:3]))
    yield Diagnosis("OK", "Python", python)
    torch = installed("torch")
    # `release` has no suffixes, so a vendor build such as 2.7.0a0+git counts as that
    # release.
    if torch is not None and Version(torch).release >= (2, 7):
        yield Diagnosis("OK", "torch", torch)
    else:
        yield Diagnosis(
            "FAIL", "torch", torch or "not installed", "install torch >= 2.7"
        )
    name = "megatron-core"
    supported = releases.SUPPORTED
    try:
        releases.check_core()
    except MegatronExtError as error:
        line = str(error).removeprefix(f"{name}: ")
        yield Diagnosis.of("FAIL", name, line)
        return
    core = releases.core_version()
    release = releases.installed_release()
    assert release is not None
    oldest = releases.oldest_python(release)
    # On Python 3.11, these releases lack only `typing.override`, which the examples'
    # environment provides.
    stands_in = sys.version_info[:2] == (3, 11) and hasattr(typing, "override")
    if sys.version_info[:2] < oldest and not stands_in:
        needed = ".".join(map(str, oldest))
        remedy = f"use Python {needed}, or pip install 'megatron-core>=0.16,<0.17'"
        finding = f"{core}, which needs Python {needed} or later"
        yield Diagnosis("FAIL", name, finding, remedy)
    elif releases.is_newer_than_known(release):
        mismatch = f"{core} is newer than the supported releases ({supported})"
        remedy = "run `megatron-ext patches check` to see whether the patches fit"
        yield Diagnosis("WARN", name, mismatch, remedy)
    else:
        tested = releases.reference().version
        yield Diagnosis("OK", name, f"{core} (tested with {tested}; {supported})")


def check_requirements() -> Iterator[Diagnosis]:
    """Compare installed packages with what this package and megatron-core require.

    Packages that meet the requirements yield no diagnosis. `check_versions` covers torch and
    megatron-core.
    """
    from packaging.requirements import Requirement

    # Otherwise, an incompatible package, such as transformers 5, only shows up as a
    # traceback in a job.
    for package in ("megatron-ext", "megatron-core"):
        try:
            lines = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            # A checkout on PYTHONPATH has no metadata.
            continue
        extras = []
        if package == "megatron-ext":
            # Optional packages (our extras) may be missing but must be compatible if
            # installed. Development packages need not be.
            names = metadata.metadata(package).get_all("Provides-Extra") or []
            extras = [name for name in names if name != "dev"]
        for line in lines:
            requirement = Requirement(line)
            if requirement.name not in ("torch", "megatron-core"):
                yield from _check_requirement(requirement, package, extras)


def _check_requirement(
    requirement: Requirement, package: str, extras: Sequence[str]
) -> Iterator[Diagnosis]:
    """Compare a package's requirement, possibly from one of its extras, with what is installed."""
    from packaging.version import Version

    def applies_to(extra: str) -> bool:
        marker = requirement.marker
        return marker is None or marker.evaluate({"extra": extra})

    is_needed = applies_to("")
    if not is_needed and not any(applies_to(extra) for extra in extras):
        return
    version = installed(requirement.name)
    is_compatible = True
    if version:
        # A vendor build such as 2.7.0a0+git counts as the release it is based on.
        base_version = Version(version).base_version
        is_compatible = requirement.specifier.contains(base_version)
    remedy = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None and is_needed:
        finding = f"not installed, but {package} needs it"
        yield Diagnosis("FAIL", requirement.name, finding, remedy)
    elif not is_compatible:
        mismatch = f"{version}, but {package} requires {requirement.specifier}"
        yield Diagnosis("WARN", requirement.name, mismatch, remedy)


def check_bridge() -> Iterator[Diagnosis]:
    """Check whether Megatron-Bridge can be used, if it is installed."""
    from megatron_ext.hosts import bridge_requirements

    name = "megatron-bridge"
    version = installed(name)
    if not version:
        return
    problems = list(bridge_requirements.problems())
    for problem in problems:
        yield Diagnosis.of("WARN", name, problem)
    if not problems:
        yield Diagnosis("OK", name, f"{version} ({bridge_requirements.SUPPORTED})")


def check_tree() -> Iterator[Diagnosis]:
    """Compare the Megatron-LM tree, if there is one, with the pinned release."""
    name = "Megatron-LM tree"
    try:
        tree = upstream.find_tree()
        if tree is not None:
            upstream.check_tree(tree)
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", name, error)
        return
    if tree is None:
        state = f"none, but megatron-core {releases.core_version()} needs one to train"
        if releases.has_training():
            state = "none, so the wheel's megatron.training is used"
        remedy = "to get upstream's own scripts, run `megatron-ext upstream fetch`"
        yield Diagnosis("WARN", name, state, remedy)
        return
    version, _, problems = upstream.tree_status(tree)
    if problems:
        remedy = f"check out {releases.reference().tag}, or run `megatron-ext upstream fetch`"
        yield Diagnosis("WARN", name, f"{tree}: {', '.join(problems[:3])}", remedy)
    else:
        yield Diagnosis("OK", name, f"{tree}, version {version}")


def check_device() -> Iterator[Diagnosis]:
    """Report the device backend that a run would use here, and the reason if it is the CPU."""
    from megatron_ext.devices import count_devices
    from megatron_ext.devices.cuda import why_idle

    try:
        device = devices.current()
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", "device", error)
        return
    # Count devices through their drivers, because the problem may be that torch was built without
    # support for them.
    count = count_devices()
    backend = f"{device.name}, collectives via {device.distributed_backend}"
    if device.name != "cpu":
        yield Diagnosis("OK", "device", f"{backend}, {count} devices")
        for name, (module, remedy) in device.kernels.items():
            if find_spec(module) is None:
                finding = "not installed, but Megatron expects it"
                yield Diagnosis("WARN", name, finding, remedy)
    elif devices.requested() != "auto":
        yield Diagnosis("OK", "device", f"{backend}, as requested")
    elif (reason := why_idle()) is not None:
        state = f"cpu, with a CUDA build of torch: {reason}"
        if count:
            state += f" ({count} in /dev)"
        remedy = "on a machine without a GPU, ignore this or set MEGATRON_EXT_DEVICE=cpu; on a "
        remedy += "machine with a GPU, install NVIDIA's driver, so that nvidia-smi shows the GPU"
        yield Diagnosis("WARN", "device", state, remedy)
    elif count:
        state = f"cpu, although the drivers show {count} devices"
        remedy = "install a torch build that supports them"
        yield Diagnosis("WARN", "device", state, remedy)
    else:
        yield Diagnosis("OK", "device", f"{backend}, no accelerator was found")


def device_here() -> DeviceKind | None:
    """Return the planner's description of this machine's device, with its actual memory.

    None: there is no accelerator, or the planner has no description of it.
    """
    try:
        return automatic.device_here()
    except MegatronExtError:
        return None  # reported by `check_device`


def check_native() -> Iterator[Diagnosis]:
    """Check that the transport's native core can be loaded."""
    from megatron_ext.transport.native import require_native

    try:
        native = require_native()
        yield Diagnosis("OK", "native core", str(native.__file__))
    except TransportError as error:
        # The error message states the problem in one sentence and the remedy in the next.
        problem, _, remedy = str(error).partition(". ")
        yield Diagnosis("WARN", "native core", problem, remedy.rstrip("."))


def check_patches() -> Iterator[Diagnosis]:
    """Check that every patch's target is the code that the patch was written for."""
    from megatron_ext.patches import listing
    from megatron_ext.patches.registry import REGISTRY

    try:
        releases.check_core()
    except MegatronExtError:
        return  # already reported by `check_versions`
    try:
        absent = listing.import_targets()
    except (ImportError, MegatronExtError) as error:
        problem = f"Megatron cannot be imported: {error}"
        yield Diagnosis("FAIL", "patches", problem, "install megatron-core and torch")
        return
    # Patches for other releases have no target in this release.
    rows = [row for row in REGISTRY.rows() if row.state != "other release"]
    problems = listing.problems(rows)
    for problem in problems:
        remedy = f"pip install megatron-core=={releases.reference().version}"
        yield Diagnosis("FAIL", "patches", problem, remedy)
    if not problems:
        num_pending = sum(row.state == "pending" for row in rows)
        state = f"{len(rows) - num_pending} of {len(rows)} patch targets verified"
        if absent:
            modules = ", ".join(absent)
            state += f", {num_pending} in modules that are not installed: {modules}"
        yield Diagnosis("OK", "patches", state)


def check_shared_memory(path: Path = Path(SHARED_MEMORY)) -> Iterator[Diagnosis]:
    """Check the size of /dev/shm, which data loaders and NCCL use."""
    name = f"shared memory {path}"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield Diagnosis(
            "FAIL", name, error.strerror or str(error), "mount a tmpfs there"
        )
        return
    # Our transports' arenas are anonymous files in memory, not in /dev/shm.
    sizes = f"{usage.total / _GIB:.1f} GiB total, {usage.free / _GIB:.1f} GiB free"
    if usage.free < MIN_SHARED_BYTES:
        remedy = "start the container with more (docker run --shm-size=16g), or remove old files"
        yield Diagnosis("WARN", name, sizes, remedy)
    else:
        yield Diagnosis("OK", name, sizes)


def check_memlock() -> Iterator[Diagnosis]:
    """Check how much memory a process may lock; RDMA requires locked memory."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft_limit == resource.RLIM_INFINITY:
        yield Diagnosis("OK", "locked memory", "unlimited")
        return
    limit = f"{soft_limit >> 10} KiB"
    if soft_limit >= _MIN_LOCKED_BYTES:
        yield Diagnosis("OK", "locked memory", limit)
    # With CAP_IPC_LOCK, which root usually has, the limit does not apply.
    elif os.geteuid() == 0:
        yield Diagnosis("OK", "locked memory", f"{limit} (root may lock more)")
    else:
        remedy = "for RDMA, raise it: `memlock unlimited` in /etc/security/limits.conf, or docker "
        remedy += "run --ulimit memlock=-1"
        yield Diagnosis("WARN", "locked memory", limit, remedy)


def check_open_files() -> Iterator[Diagnosis]:
    """Check how many files a process may open, because each connection between ranks needs one."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        yield Diagnosis("OK", "open files", "unlimited")
        return
    if soft_limit >= _MIN_OPEN_FILES:
        yield Diagnosis("OK", "open files", f"{soft_limit} per process")
        return
    remedy = f"run `ulimit -n {_MIN_OPEN_FILES}` before the job"
    if hard_limit != resource.RLIM_INFINITY and hard_limit < _MIN_OPEN_FILES:
        remedy = f"raise it: `nofile {_MIN_OPEN_FILES}` in /etc/security/limits.conf, or docker "
        remedy += f"run --ulimit nofile={_MIN_OPEN_FILES}"
    problem = f"{soft_limit} per process, but a rank's connections may need more"
    yield Diagnosis("WARN", "open files", problem, remedy)


def check_rdma() -> Iterator[Diagnosis]:
    """Try every step of opening an RDMA link, up to a queue pair."""
    # Listing devices is not enough: only a queue pair reveals bad limits, permissions or GIDs.
    from megatron_ext.transport.native import probe_rdma

    try:
        usable, finding, remedy = probe_rdma()
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", "RDMA", error)
        return
    if usable:
        yield Diagnosis("OK", "RDMA", finding)
    else:
        remedy = remedy or "use --pipeline-transport tcp, which works without RDMA"
        yield Diagnosis("WARN", "RDMA", finding, remedy)


MACHINE = (
    check_versions, check_requirements, check_bridge, check_tree, check_device, check_native,
    check_patches, check_shared_memory, check_memlock, check_open_files, check_rdma,
)  # fmt: skip
"""The checks for this machine, in the order of the report."""


def check_hosts(plan: JobPlan, timeout_s: float) -> Iterator[Diagnosis]:
    """Run `launch`'s preflight checks on every host without starting a job."""
    # Use the agents and requests from `launch`, so that both commands agree about a host.
    with Agents(plan) as agents:
        answers = agents.look(timeout_s)
    for host, answer in zip(plan.hosts, answers, strict=True):
        name = f"host {host.name}"
        for problem in answer["problems"]:
            yield Diagnosis.of("FAIL", name, problem)
        for warning in answer["warnings"]:
            yield Diagnosis.of("WARN", name, warning)
        if not answer["problems"]:
            versions = answer["same"]
            state = f"torch {versions['torch']}, megatron-core {versions['megatron-core']}, "
            state += f"{answer['devices']} devices, clock {answer['ahead_s']:+.1f} s, "
            state += f"{answer['free_bytes'] >> 30} GiB free for logs"
            yield Diagnosis("OK", name, state)
