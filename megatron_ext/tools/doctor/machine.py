"""Checks of this machine: memory, limits, RDMA, ports."""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import MegatronExtError
from megatron_ext.schedules import generate
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.schedules.table.validation import validate
from megatron_ext.tools.doctor.finding import Finding, fail, ok, warn
from megatron_ext.tools.launch.fitness import MIN_SHARED_BYTES

__all__ = [
    "Sizes",
    "arena_bytes",
    "check_arenas",
    "check_memlock",
    "check_ports",
    "check_rdma",
    "check_shared_memory",
]

_MIN_LOCKED_BYTES = 1 << 30
_DEFAULT_PORT = 29500
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to


def check_shared_memory(path: Path = _SHM) -> Iterator[Finding]:
    """Check the size of /dev/shm, which data loaders and NCCL use (our own arenas do not)."""
    name = f"shared memory {path}"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield fail(name, error.strerror or str(error), "mount a tmpfs there")
        return
    found = f"{_gib(usage.total)} in all, {_gib(usage.free)} free"
    if usage.free < MIN_SHARED_BYTES:
        remedy = "give the container more (docker run --shm-size=16g), or remove old files there"
        yield warn(name, found, remedy)
    else:
        yield ok(name, found)


def check_memlock(limit_bytes: int | None = None) -> Iterator[Finding]:
    """Check how much memory a process may lock; RDMA needs locked memory.

    Args:
        limit_bytes: The soft limit; by default that of this process.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    if soft == resource.RLIM_INFINITY or soft >= _MIN_LOCKED_BYTES or os.geteuid() == 0:
        found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
        note = " (root may lock more)" if 0 <= soft < _MIN_LOCKED_BYTES else ""
        yield ok("locked memory", found + note)
    else:
        remedy = "for RDMA raise it: `memlock unlimited` in /etc/security/limits.conf, or docker "
        remedy += "run --ulimit memlock=-1"
        yield warn("locked memory", f"{soft >> 10} KiB", remedy)


def check_rdma() -> Iterator[Finding]:
    """Try every step of an RDMA link, down to a queue pair."""
    from megatron_ext.transport.rdma_probe import probe

    try:
        result = probe()
    except MegatronExtError as error:
        yield fail("RDMA", str(error), "")
        return
    last = result.findings[-1]
    if result.usable:
        yield ok("RDMA", result.reason)
    else:
        remedy = last.remedy or "--pipeline-transport tcp needs none of this"
        yield warn("RDMA", f"{last.step}: {last.text}", remedy)


def check_ports(port: int = _DEFAULT_PORT) -> Iterator[Finding]:
    """Try to listen on torchrun's default port, and on any free one."""
    for wanted in (port, 0):
        what = f"port {wanted}" if wanted else "ephemeral ports"
        try:
            with socket.create_server(("", wanted)):
                yield ok(what, "free" if wanted else "available")
        except OSError as error:
            remedy = "give torchrun another --master-port, or use `megatron-ext launch`, which "
            remedy += "finds a free one"
            yield warn(what, error.strerror or str(error), remedy)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run that determine the memory of its arenas."""

    schedule: str
    pp: int
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    hidden_size: int
    bytes_per_value: int = 2
    extra_activations: int | None = None
    """`--dpp-extra-activations` of a dynamic order; None: the order is the table's."""


def arena_bytes(sizes: Sizes) -> int:
    """Return the upper bound on the memory of one rank's arenas, in bytes.

    The model's routes are not known here; each adds the messages that skip a stage.
    """
    table = generate(sizes.schedule, sizes.pp, sizes.num_microbatches)
    peers: dict[int, set[int]] = defaultdict(set)
    for source, target, _ in validate(table).slots:
        if source != target:
            peers[source].add(target)
            peers[target].add(source)
    message = sizes.seq_length * sizes.micro_batch_size * sizes.hidden_size * sizes.bytes_per_value
    pages = math.ceil(message / resource.getpagesize()) * resource.getpagesize()
    slots = arena_slots(table, sizes.extra_activations)
    return max(map(len, peers.values()), default=0) * slots * pages


def check_arenas(sizes: Sizes, ranks_here: int | None = None) -> Iterator[Finding]:
    """Compare the memory of the transport's arenas with the available memory.

    Args:
        sizes: The sizes of the run.
        ranks_here: Ranks on this machine; by default one whole pipeline.
    """
    name = "transport arenas"
    each = arena_bytes(sizes)
    ranks = sizes.pp if ranks_here is None else ranks_here
    available = _available_bytes()
    found = (
        f"{_mib(each)} for each rank of {sizes.schedule} at most, {_mib(each * ranks)} for {ranks} "
        f"ranks; {_mib(available)} are available"
    )
    if each * ranks > available:
        remedy = (
            "lower the micro-batch size, or use --pipeline-transport torch, which has no arenas"
        )
        yield fail(name, found, remedy)
    elif each * ranks > available // 2:
        yield warn(name, found, "more than half of the memory goes to messages")
    else:
        yield ok(name, found)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
