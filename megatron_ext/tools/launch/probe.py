"""The findings of an agent on its host before anything starts; `preflight` judges them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import socket
import sys
import time
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from megatron_ext.errors import MegatronExtError
from megatron_ext.tools.launch import protocol
from megatron_ext.transport.address import source_address

__all__ = ["code_hash", "installed_version", "interface_of", "look", "versions"]

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to


def look(
    request: dict[str, Any], log_dir: Path, workdir_error: str | None, log_error: str | None
) -> protocol.Message:
    """Return the findings of this host for the launcher.

    Args:
        request: The agent's work; its environment and directory are already set.
        log_dir: Directory of the logs.
        workdir_error: Why the work directory cannot be used, or None.
        log_error: Why the log directory cannot be used, or None.
    """
    found: protocol.Message = {
        "kind": "hello",
        "protocol": protocol.VERSION,
        "pid": os.getpid(),
        "clock": time.time(),
        "versions": versions(),
        "log_dir": str(log_dir),
        "log_error": log_error,
    }
    if request["count_devices"]:
        from megatron_ext.devices.count import count_devices

        found["devices"] = count_devices()
    with contextlib.suppress(OSError):
        found["shared_free_bytes"] = shutil.disk_usage(_SHARED_MEMORY).free
    if log_error is None:
        found["free_bytes"] = shutil.disk_usage(log_dir).free
    found["script_error"], found["script_hash"] = workdir_error, None
    if workdir_error is None:
        found["script_error"], found["script_hash"] = _script(request)
    if request["node"] == 0:
        found["port"], found["port_error"] = _port(request["master_port"])
    if request.get("peer"):
        found.update(_address(request["peer"]))
    return found


def versions() -> dict[str, str]:
    """Return the versions that must be equal on every host."""
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "megatron_ext": f"files {code_hash()}",
    }
    return {**found, **{name: installed_version(name) for name in ("torch", "megatron-core")}}


def installed_version(distribution: str) -> str:
    """Return the version of a distribution, without importing it, or `not installed`."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def code_hash() -> str:
    """Return a short hash of this package's Python files: two checkouts may share a version."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _script(request: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return an error about the script here, and its hash if it is a file."""
    words: list[str] = request["command"]
    if request["per_node"]:
        missing = shutil.which(words[0]) is None
        return (f"there is no command {words[0]}" if missing else None), None
    from megatron_ext.upstream import runner

    try:
        start = runner.choose(words[0], embedded=request["embedded"])
    except MegatronExtError as error:
        return str(error), None
    if start.script is None:
        return None, f"embedded {start.model}"
    return None, hashlib.sha256(start.script.read_bytes()).hexdigest()[:8]


def _port(wanted: int | None) -> tuple[int | None, str | None]:
    """Return the port for the rendezvous of all ranks: the requested one, or a free one."""
    # Rank 0 listens seconds later. Below 32768, where systems begin to number the ports of
    # outgoing connections, nothing takes it in between.
    ports = [wanted] if wanted else random.sample(range(20000, 32768), 5)
    taken = [_why_taken(port) for port in ports]
    free = [port for port, why in zip(ports, taken, strict=True) if why is None]
    return (free[0], None) if free else (None, taken[-1])


def _why_taken(port: int) -> str | None:
    try:
        with socket.create_server(("", port)):
            return None
    except OSError as error:
        return "it is in use" if error.errno == errno.EADDRINUSE else str(error)


def _address(peer: str) -> protocol.Message:
    try:
        address = source_address(peer)
    except OSError as error:
        return {"address_error": f"{peer}: {error.strerror or error}"}
    return {"address": address, "interface": interface_of(address)}


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address, or None."""
    wanted, families = ip_address(address.partition("%")[0]), {socket.AF_INET, socket.AF_INET6}
    for name, found in psutil.net_if_addrs().items():
        mine = (each.address.partition("%")[0] for each in found if each.family in families)
        if wanted in map(ip_address, mine):
            return str(name)
    return None
