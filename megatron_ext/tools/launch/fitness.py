"""Fitness of a host for a job: problems, warnings, and what must be equal on every host."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import socket
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_ext.devices import count_devices
from megatron_ext.errors import MegatronExtError
from megatron_ext.transport.address import source_address
from megatron_ext.version import code_hash, installed

if TYPE_CHECKING:
    from megatron_ext.tools.launch.runs import Json

MIN_FREE_BYTES = 64 << 20
"""Less free space than this for the logs of a host is a problem."""
MIN_SHARED_BYTES = 1 << 30
"""Less free shared memory than this is a warning; a container has 64 MiB by default."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to


def look(request: Json, log_dir: Path) -> Json:
    """Return the fitness of this host for a request, whose environment is already set.

    The request's directory becomes the current one; that of the logs must not be there yet.
    """
    problems: list[str] = []
    found: Json = {
        "kind": "hello",
        "pid": os.getpid(),
        "clock": time.time(),
        "log_dir": str(log_dir),
        # Without torch, whose import would take most of the time of an answer.
        "devices": 0 if request["per_node"] and request["nproc"] else count_devices(),
        "problems": problems,
        "warnings": [],
        "same": {
            "python": ".".join(map(str, sys.version_info[:3])),
            "megatron_ext": f"files {code_hash()}",
            "torch": installed("torch") or "not installed",
            "megatron-core": installed("megatron-core") or "not installed",
        },
    }
    try:
        os.chdir(request["workdir"])
    except OSError as error:
        problems.append(
            f"the work directory {request['workdir']} cannot be entered: {error.strerror}; copy it "
            f"there with rsync"
        )
    # The folder itself is made at the start only, so that a job that is refused leaves none.
    there = next(folder for folder in log_dir.parents if folder.exists())
    found["free_bytes"] = free_bytes = shutil.disk_usage(there).free
    if log_dir.exists() or not os.access(there, os.W_OK | os.X_OK):
        why = "it belongs to another run" if log_dir.exists() else f"{there} is not writable"
        problems.append(
            f"logs cannot be written to {log_dir}: {why}; use another --run-id or --log-dir"
        )
    elif free_bytes < MIN_FREE_BYTES:
        problems.append(
            f"only {free_bytes >> 20} MiB are free for logs in {there}; make room "
            f"({MIN_FREE_BYTES >> 20} MiB at least), or use another --log-dir"
        )
    if Path(SHARED_MEMORY).is_dir():
        shared_bytes = shutil.disk_usage(SHARED_MEMORY).free
        if shared_bytes < MIN_SHARED_BYTES:
            found["warnings"].append(
                f"{shared_bytes >> 20} MiB are free in {SHARED_MEMORY}, and data loaders and NCCL "
                f"take more; start its container with more (docker run --shm-size=16g)"
            )
    script = request["command"][0]
    if request["per_node"]:
        if shutil.which(script) is None:
            problems.append(f"there is no command {script}; copy it there with rsync")
    elif not problems:
        from megatron_ext.upstream import runner

        try:
            start = runner.choose(script)
            content = start.script.read_bytes() if start.script else b"the wheel"
            found["same"][f"{script}, content"] = hashlib.sha256(content).hexdigest()[:8]
        except MegatronExtError as error:
            problems.append(f"{error}; copy it there with rsync")
    if 0 < found["devices"] < request["nproc"]:
        problems.append(
            f"{request['nproc']} processes are planned, but it has {found['devices']} devices; "
            f"lower its slots=N, or --nproc"
        )
    if request["node"] == 0:
        # Another program may take a free port before rank 0 listens, seconds later. Below 32768,
        # where systems begin to number the ports of outgoing connections, nothing takes it.
        wanted = request["master_port"]
        ports = [wanted] if wanted else random.sample(range(20000, 32768), 5)
        taken = {port: _why_taken(port) for port in ports}
        found["port"] = next((port for port, why in taken.items() if why is None), None)
        if found["port"] is None:
            problems.append(
                f"port {wanted} cannot be used for the ranks to meet: {taken[ports[-1]]}; leave "
                f"out --master-port to get a free one"
            )
    if request["peer"] is not None:
        try:
            found["address"] = source_address(request["peer"])
            found["interface"] = _interface_of(found["address"])
        except OSError as error:
            problems.append(
                f"it cannot reach {request['peer']}: {error.strerror or error}; give that host an "
                f"address that all others can reach, with addr=IP in the hostfile"
            )
    return found


def _why_taken(port: int) -> str | None:
    try:
        with socket.create_server(("", port)):
            return None
    except OSError as error:
        return "it is in use" if error.errno == errno.EADDRINUSE else str(error)


def _interface_of(address: str) -> str | None:
    """Return the network interface that has an address, for gloo, or None."""
    wanted, families = ip_address(address.partition("%")[0]), {socket.AF_INET, socket.AF_INET6}
    for name, found in psutil.net_if_addrs().items():
        mine = (each.address.partition("%")[0] for each in found if each.family in families)
        if wanted in map(ip_address, mine):
            return str(name)
    return None
