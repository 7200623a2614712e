"""The checks of `doctor`: what is installed, this machine, a training's flags, other hosts.

Each is a generator of findings. They import torch and Megatron, which takes seconds.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from megatron_ext import devices
from megatron_ext.config.flags import read_words
from megatron_ext.config.hosting import preflight
from megatron_ext.errors import MegatronExtError, TransportError
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.schedules.table.validation import validate
from megatron_ext.tools.launch.fitness import MIN_SHARED_BYTES, SHARED_MEMORY
from megatron_ext.tools.launch.supervise import Agents, warnings
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from megatron_ext.version import __version__, code_hash, installed

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.tools.launch.plan import JobPlan
    from megatron_ext.tools.launch.ssh import Ssh

_MIN_LOCKED_BYTES = 1 << 30
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report."""

    level: Literal["OK", "WARN", "FAIL"]
    """FAIL: the requested training cannot work. WARN: it works, with a disadvantage."""
    check: str
    """The subject of the check, in two or three words."""
    found: str
    remedy: str = ""
    """Remedy; empty if nothing is wrong."""

    @classmethod
    def of(cls, level: Literal["WARN", "FAIL"], check: str, line: object) -> Diagnosis:
        """Return the finding of a line `found; remedy`, as all our errors are."""
        found, _, remedy = str(line).partition("; ")
        return cls(level, check, found, remedy)

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<4} {self.check}: {self.found}{remedy}"


def check_versions() -> Iterator[Diagnosis]:
    """Compare Python, torch and megatron-core with what this package supports."""
    from packaging.version import Version

    yield Diagnosis("OK", "megatron_ext", f"{__version__}, files {code_hash()}")
    yield Diagnosis("OK", "Python", ".".join(map(str, sys.version_info[:3])))
    torch = installed("torch")
    if torch is not None and Version(torch).release >= (2, 7):
        yield Diagnosis("OK", "torch", torch)
    else:
        yield Diagnosis("FAIL", "torch", torch or "not installed", "install torch >= 2.7")
    name, supported = "megatron-core", releases.SUPPORTED
    try:
        releases.check_core()
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", name, str(error).removeprefix(f"{name}: "))
        return
    core, release = releases.core_version(), releases.installed_release()
    assert release is not None
    oldest = releases.oldest_python(release)
    # The examples' environment fills in the one thing that wheels for 3.11 lack.
    stands_in = sys.version_info[:2] == (3, 11) and hasattr(typing, "override")
    if sys.version_info[:2] < oldest and not stands_in:
        needed = ".".join(map(str, oldest))
        remedy = f"use Python {needed}, or pip install 'megatron-core>=0.16,<0.17'"
        yield Diagnosis("FAIL", name, f"{core}, which needs Python {needed} or later", remedy)
    elif releases.is_newer_than_known(release):
        shown = f"{core} is newer than this package knows ({supported})"
        yield Diagnosis("WARN", name, shown, "`megatron-ext patches check` shows whether it fits")
    else:
        tested = releases.reference().version
        yield Diagnosis("OK", name, f"{core} (tested with {tested}; {supported})")


def check_requirements() -> Iterator[Diagnosis]:
    """Compare installed packages with the requirements of this package and of megatron-core.

    Packages that fit yield nothing; torch and megatron-core have a check of their own.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    for package in ("megatron-ext", "megatron-core"):
        try:
            lines = metadata.requires(package) or []
        except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
            continue
        extras = metadata.metadata(package).get_all("Provides-Extra") or []
        # Packages of our extras may be absent, but have to fit; developers' tools need not.
        extras = [name for name in extras if package == "megatron-ext" and name != "dev"]
        for requirement in map(Requirement, lines):
            applies = requirement.marker.evaluate if requirement.marker else lambda _: True
            needed = applies({"extra": ""})
            if requirement.name in ("torch", "megatron-core") or not (
                needed or any(applies({"extra": extra}) for extra in extras)
            ):
                continue
            found = installed(requirement.name)
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            if found is None and needed:
                shown = f"not installed, {package} needs it"
                yield Diagnosis("FAIL", requirement.name, shown, remedy)
            # A vendor's build of a release, like 2.7.0a0+git, counts as that release.
            elif found and not requirement.specifier.contains(Version(found).base_version):
                shown = f"{found}, {package} requires {requirement.specifier}"
                yield Diagnosis("WARN", requirement.name, shown, remedy)


def check_bridge() -> Iterator[Diagnosis]:
    """Check whether Megatron-Bridge can be used, if it is here."""
    from megatron_ext.hosts import bridge_requirements

    version, name = bridge_requirements.bridge_version(), "megatron-bridge"
    problems = list(bridge_requirements.problems()) if version else []
    for problem in problems:
        yield Diagnosis.of("WARN", name, problem)
    if version and not problems:
        yield Diagnosis("OK", name, f"{version} ({bridge_requirements.SUPPORTED})")


def check_tree() -> Iterator[Diagnosis]:
    """Compare the Megatron-LM tree with the pin, if there is one."""
    name = "Megatron-LM tree"
    try:
        tree = upstream.find_tree()
        if tree is not None:
            upstream.check_tree(tree)
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", name, error)
        return
    if tree is None:
        found = f"none, and megatron-core {releases.core_version()} trains with one only"
        if releases.has_training():
            found = "none, megatron.training of the wheel is used"
        remedy = "for upstream's own scripts run `megatron-ext upstream fetch`"
        yield Diagnosis("WARN", name, found, remedy)
        return
    status = upstream.tree_status(tree)
    if status.problems:
        remedy = f"check out {releases.reference().tag}, or fetch it: `megatron-ext upstream fetch`"
        yield Diagnosis("WARN", name, f"{tree}: {', '.join(status.problems[:3])}", remedy)
    else:
        yield Diagnosis("OK", name, f"{tree}, version {status.version}")


def check_device() -> Iterator[Diagnosis]:
    """Report the device backend that a run would use here, and why not an accelerator."""
    from megatron_ext.devices import count_devices
    from megatron_ext.devices.cuda import why_idle

    try:
        device = devices.current()
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", "device", error)
        return
    count = count_devices()  # that the drivers show, whatever torch was built for
    shown = f"{device.name}, collectives by {device.distributed_backend}"
    if device.name != "cpu":
        yield Diagnosis("OK", "device", f"{shown}, {count} devices")
    elif devices.requested() != "auto":
        yield Diagnosis("OK", "device", f"{shown}, as requested")
    elif (reason := why_idle()) is not None:
        found = f"cpu, with a CUDA build of torch: {reason}" + (f" ({count} in /dev)" * bool(count))
        remedy = "nothing is wrong on a machine without a GPU (MEGATRON_EXT_DEVICE=cpu says so); "
        remedy += "on one with a GPU install NVIDIA's driver, until nvidia-smi shows it"
        yield Diagnosis("WARN", "device", found, remedy)
    elif count:
        found = f"cpu, though the drivers show {count} devices"
        yield Diagnosis("WARN", "device", found, "install the build of torch for them")
    else:
        yield Diagnosis("OK", "device", f"{shown}, no accelerator is needed")


def check_native() -> Iterator[Diagnosis]:
    """Try to load the native core of the transport."""
    from megatron_ext.transport.native import require_native

    try:
        yield Diagnosis("OK", "native core", str(require_native().__file__))
    except TransportError as error:
        found, _, remedy = str(error).partition(". ")
        yield Diagnosis("WARN", "native core", found, remedy.rstrip("."))


def check_patches() -> Iterator[Diagnosis]:
    """Compare every target of a patch with the Megatron that it was written for."""
    from megatron_ext.patches import listing
    from megatron_ext.patches.registry import REGISTRY

    try:
        releases.check_core()
    except MegatronExtError:
        return  # `check_versions` has reported it
    try:
        absent = listing.import_targets()
    except (ImportError, MegatronExtError) as error:
        found = f"Megatron cannot be imported: {error}"
        yield Diagnosis("FAIL", "patches", found, "install megatron-core and torch")
        return
    rows = [row for row in REGISTRY.rows() if row.state != "other release"]
    problems = listing.problems(rows)
    for problem in problems:
        remedy = f"pip install megatron-core=={releases.reference().version}"
        yield Diagnosis("FAIL", "patches", problem, remedy)
    if not problems:
        pending = sum(row.state == "pending" for row in rows)
        found = f"{len(rows) - pending} of {len(rows)} patch targets verified"
        note = f", {pending} belong to modules that this install lacks: {', '.join(absent)}"
        yield Diagnosis("OK", "patches", found + note * bool(absent))


def check_shared_memory(path: Path = Path(SHARED_MEMORY)) -> Iterator[Diagnosis]:
    """Check the size of /dev/shm, which data loaders and NCCL use (our own arenas do not)."""
    name = f"shared memory {path}"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield Diagnosis("FAIL", name, error.strerror or str(error), "mount a tmpfs there")
        return
    found = f"{usage.total / _GIB:.1f} GiB in all, {usage.free / _GIB:.1f} GiB free"
    if usage.free < MIN_SHARED_BYTES:
        remedy = "give the container more (docker run --shm-size=16g), or remove old files there"
        yield Diagnosis("WARN", name, found, remedy)
    else:
        yield Diagnosis("OK", name, found)


def check_memlock() -> Iterator[Diagnosis]:
    """Check how much memory a process may lock; RDMA needs locked memory."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    if soft == resource.RLIM_INFINITY or soft >= _MIN_LOCKED_BYTES:
        yield Diagnosis("OK", "locked memory", found)
    elif os.geteuid() == 0:  # CAP_IPC_LOCK
        yield Diagnosis("OK", "locked memory", f"{found} (root may lock more)")
    else:
        remedy = "for RDMA raise it: `memlock unlimited` in /etc/security/limits.conf, or docker "
        yield Diagnosis("WARN", "locked memory", found, remedy + "run --ulimit memlock=-1")


def check_rdma() -> Iterator[Diagnosis]:
    """Try every step of an RDMA link, down to a queue pair."""
    from megatron_ext.transport import rdma_probe

    try:
        result = rdma_probe.probe()
    except MegatronExtError as error:
        yield Diagnosis.of("FAIL", "RDMA", error)
        return
    last = result.findings[-1]
    if result.usable:
        yield Diagnosis("OK", "RDMA", result.reason)
    else:
        remedy = last.remedy or "--pipeline-transport tcp needs none of this"
        yield Diagnosis("WARN", "RDMA", f"{last.step}: {last.text}", remedy)


def check_training(words: Sequence[str]) -> Iterator[Diagnosis]:
    """Check the flags of a training: what its schedule takes, changes, refuses and allocates.

    Args:
        words: Its command line, with or without the script, after `--`.
    """
    # argparse leaves the separator in, and the script may be named or not.
    flags = [word for word in words if word != "--"]
    flags = flags[1:] if flags and flags[0].endswith(".py") else flags
    found = preflight(flags)
    for refusal in found.refusals:
        yield Diagnosis("FAIL", "training", refusal.reason, refusal.remedy)
    for line in (*found.changes, *found.notices):
        yield Diagnosis("OK", "training", line)
    if not found.accepted:
        return
    own = "Megatron's own schedule"
    yield Diagnosis("OK", "training", f"{found.pipeline.name if found.pipeline else own} takes "
                  "these flags")  # fmt: skip
    given, pipeline = read_words(flags), found.pipeline or found.transport_only
    sizes = [given.get(name) for name in ("seq_length", "micro_batch_size", "hidden_size")]
    if pipeline is None or pipeline.transport == "torch" or not all(sizes):
        return
    # A message is the activation of one micro-batch.
    values = math.prod(size for size in sizes if size)
    each = arena_bytes(pipeline, values * (2 if given.get("bf16") or given.get("fp16") else 4))
    whole, available = each * pipeline.pp, psutil.virtual_memory().available
    shown = f"{each / _MIB:.0f} MiB for each rank at most, {whole / _MIB:.0f} MiB for a pipeline "
    shown += f"on one machine, {available / _MIB:.0f} MiB available here"
    remedy = "lower the micro-batch size, or use --pipeline-transport torch, which has no arenas"
    level: Literal["FAIL", "WARN"] = "FAIL" if whole > available else "WARN"
    is_much = whole > available // 2
    yield Diagnosis(level if is_much else "OK", "transport arenas", shown, remedy * is_much)


def arena_bytes(pipeline: Pipeline, message_bytes: int) -> int:
    """Return the upper bound on the memory of one rank's arenas, in bytes.

    The model's routes are not known here; each adds the messages that skip a stage.
    """
    table, peers = pipeline.full, defaultdict[int, set[int]](set)
    for source, target, _ in validate(table).slots:
        if source != target:
            peers[source].add(target)
            peers[target].add(source)
    page_bytes = resource.getpagesize()
    slots = arena_slots(
        table, pipeline.dynamic.margin if pipeline.dynamic else None, pipeline.config.stash_ratio
    )
    most = max(map(len, peers.values()), default=0)
    return most * slots * math.ceil(message_bytes / page_bytes) * page_bytes


def check_hosts(plan: JobPlan, ssh: Ssh, timeout_s: float) -> Iterator[Diagnosis]:
    """Run the preflight checks of a launch on every host, without starting anything."""
    # The agents of a launch, with its requests: doctor and launch cannot disagree about a host.
    with Agents(plan, ssh) as agents:
        found, problems = agents.look(timeout_s)
    noted = dict.fromkeys(problems, "FAIL") | dict.fromkeys(warnings(found), "WARN")
    for line, level in noted.items():
        name, _, text = line.partition(": ")
        yield Diagnosis.of(level, f"host {name}", text)  # type: ignore[arg-type]
    bad = {line.partition(": ")[0] for line in problems}
    for name, each in found.items():
        if name not in bad:
            same = each["same"]
            yield Diagnosis(
                "OK",
                f"host {name}",
                f"torch {same['torch']}, megatron-core {same['megatron-core']}, {each['devices']} "
                f"devices, clock {each['ahead_s']:+.1f} s, {each['free_bytes'] >> 30} GiB free for "
                f"logs",
            )
