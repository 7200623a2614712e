"""A probe that finds whether this host can use RDMA, and if not, the reason and a remedy.

The native core tries each step: it opens libibverbs, lists devices, chooses a port and a GID,
registers memory and connects a queue pair to itself. It needs no peer and leaves nothing open.
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
    """The result of one step."""

    step: str
    """One of native module, library, devices, port, memory and queue pair."""
    usable: bool
    """Whether the step succeeded."""
    text: str
    """The finding, in words."""
    remedy: str = ""
    """The remedy; empty if the step succeeded or there is none."""

    def __str__(self) -> str:
        """Return the finding and its remedy in one line."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.step}: {self.text}{remedy}"


@dataclass(frozen=True)
class ProbeResult:
    """The findings of all steps tried, in order. The first failure is the last finding."""

    findings: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether this host can use RDMA links."""
        return self.findings[-1].usable

    @property
    def reason(self) -> str:
        """The port to be used, or the reason for failure, in one line."""
        if not self.usable:
            return str(self.findings[-1])
        return next(finding.text for finding in self.findings if finding.step == "port")


def probe(address: str | None = None, *, sysfs: str = "/sys") -> ProbeResult:
    """Try every step of opening an RDMA link.

    Args:
        address: IP address of this host that the port must have (see `--node-ips`). None: the best
            port is chosen.
        sysfs: Mount point of sysfs; another directory in tests.

    Returns:
        The findings. A missing library, device or port is a finding, not an exception.

    Raises:
        TransportError: The address or a variable MEGATRON_EXT_IB_* is malformed.
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
    """Compare the core's list of devices, ports and GIDs with that of pyverbs, if installed.

    Returns:
        One line for each difference; None without pyverbs or libibverbs.
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
    """Return the listing of pyverbs, from this Python or the system's; None if neither has it."""
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
    """Return the text of a value; IPv6 addresses (GIDs) in their exploded form."""
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
