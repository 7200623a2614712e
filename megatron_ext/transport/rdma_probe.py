"""Whether this host can use RDMA, and if not, why and what to do.

The native core tries it, step by step: it opens libibverbs, lists devices, chooses a port and a
GID, registers memory and connects a queue pair to itself. Nothing is left open afterwards, and no
peer is needed.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native

if TYPE_CHECKING:
    from megatron_ext.transport._C import RdmaDevice

__all__ = ["Finding", "ProbeResult", "probe", "witness_differences"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """What one step found."""

    step: str
    """One of native module, library, devices, port, memory and queue pair."""
    usable: bool
    text: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty if nothing is wrong or there is no remedy."""

    def __str__(self) -> str:
        """One line."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.step}: {self.text}{remedy}"


@dataclass(frozen=True)
class ProbeResult:
    """All steps that were tried, in order; none follows one that failed."""

    findings: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether a link over RDMA can be made from this host."""
        return self.findings[-1].usable

    @property
    def reason(self) -> str:
        """In one line, why not; if it is usable, what would be used."""
        if not self.usable:
            return str(self.findings[-1])
        return next(finding.text for finding in self.findings if finding.step == "port")


def probe(address: str | None = None, *, sysfs: str = "/sys") -> ProbeResult:
    """Try what a link over RDMA needs.

    Args:
        address: The IP address, of this host, that the port has to have (see `--node-ips`). None:
            the best port there is.
        sysfs: Where the kernel tells about devices; another place in tests.

    Returns:
        What was found; never raises for something that is missing.

    Raises:
        TransportError: The address, or a variable MEGATRON_EXT_IB_*, is malformed.
    """
    try:
        native = require_native()
    except TransportError as error:
        return ProbeResult((Finding("native module", False, str(error)),))
    try:
        found = native.probe_rdma(address or "", sysfs)
    except ValueError as error:
        raise TransportError(str(error)) from error
    findings = tuple(Finding(item.step, item.is_good, item.text, item.remedy) for item in found)
    result = ProbeResult(findings)
    _log.debug("RDMA: %s", "; ".join(str(finding) for finding in findings))
    return result


def witness_differences(sysfs: str = "/sys") -> list[str] | None:
    """Compare our list of devices, ports and GIDs with that of pyverbs, where it is installed.

    Returns:
        A line for each difference; None without pyverbs or without libibverbs.
    """
    theirs = _ask_pyverbs()
    if theirs is None:
        return None
    try:
        devices = require_native().rdma_devices(sysfs)
    except TransportError:
        return None
    return _differences(_flatten(devices), theirs)


def _ask_pyverbs() -> dict[str, str] | None:
    """What pyverbs says, for the first Python that has it: ours, or the system's."""
    script = Path(__file__).with_name("pyverbs_listing.py")
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run(
                [python, str(script)], capture_output=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        listing = json.loads(done.stdout)
        return {
            f"{device} port {number} {what}": _canonical(value)
            for device, ports in listing.items()
            for number, port in ports.items()
            for what, value in (
                ("is active", port["active"]),
                ("LID", port["lid"]),
                ("MTU", 128 << port["mtu"]),
                *((f"GID {index}", gid) for index, gid in port["gids"].items()),
            )
        }
    return None


def _flatten(devices: list[RdmaDevice]) -> dict[str, str]:
    return {
        f"{device.name} port {port.number} {what}": _canonical(value)
        for device in devices
        for port in device.ports
        for what, value in (
            ("is active", port.state == "active"),
            ("LID", port.lid),
            ("MTU", port.mtu_bytes),
            *((f"GID {entry.index}", entry.gid) for entry in port.gids),
        )
    }


def _canonical(value: object) -> str:
    """One way to write an address, and anything else."""
    try:
        return ipaddress.IPv6Address(str(value)).exploded
    except ipaddress.AddressValueError:
        return str(value)


def _differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [
        f"{what}: {ours.get(what, 'missing')}, pyverbs says {theirs.get(what, 'missing')}"
        for what in sorted(ours.keys() | theirs.keys())
        if ours.get(what) != theirs.get(what)
    ]
