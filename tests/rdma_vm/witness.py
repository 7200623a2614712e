"""Compares pyverbs' list of RDMA devices (rdma-core's own binding) with the native core's."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from pathlib import Path

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native


def differences(sysfs: str = "/sys") -> list[str] | None:
    """Compare devices, ports and GIDs; None without pyverbs or libibverbs."""
    theirs = from_pyverbs()
    if theirs is None:
        return None
    try:
        devices = require_native().rdma_devices(sysfs)
    except TransportError:
        return None
    ours = {
        f"{device.name} port {port.number} {what}": canonical(value)
        for device in devices
        for port in device.ports
        for what, value in (
            ("is active", port.state == "active"),
            ("LID", port.lid),
            ("MTU", port.mtu_bytes),
            *((f"GID {entry.index}", entry.gid) for entry in port.gids),
        )
    }
    return [
        f"{what}: {ours.get(what, 'missing')}, pyverbs says {theirs.get(what, 'missing')}"
        for what in sorted(ours.keys() | theirs.keys())
        if ours.get(what) != theirs.get(what)
    ]


def from_pyverbs() -> dict[str, str] | None:
    """Return the list from pyverbs in this Python or the system's; None if neither has it."""
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
            f"{device} port {number} {what}": canonical(value)
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


def canonical(value: object) -> str:
    """Return the text of a value; IPv6 addresses (GIDs) in their exploded form."""
    try:
        return ipaddress.IPv6Address(str(value)).exploded
    except ipaddress.AddressValueError:
        return str(value)
