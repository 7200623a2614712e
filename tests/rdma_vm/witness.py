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
    by_pyverbs = from_pyverbs()
    if by_pyverbs is None:
        return None
    try:
        devices = require_native().rdma_devices(sysfs)
    except TransportError:
        return None
    by_this_package = {
        f"{device.name} port {port.number} {name}": canonical(value)
        for device in devices
        for port in device.ports
        for name, value in (
            ("is active", port.state == "active"),
            ("LID", port.lid),
            ("MTU", port.mtu_bytes),
            *((f"GID {entry.index}", entry.gid) for entry in port.gids),
        )
    }
    lines = []
    for name in sorted(by_this_package.keys() | by_pyverbs.keys()):
        value = by_this_package.get(name, "missing")
        value_by_pyverbs = by_pyverbs.get(name, "missing")
        if value != value_by_pyverbs:
            lines.append(f"{name}: {value}, pyverbs says {value_by_pyverbs}")
    return lines


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
            f"{device} port {number} {name}": canonical(value)
            for device, ports in listing.items()
            for number, port in ports.items()
            for name, value in (
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
