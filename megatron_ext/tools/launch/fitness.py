"""Checks whether a host can run its part of a job; the agent calls this before the job starts."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_ext.devices import count_devices
from megatron_ext.errors import LaunchError, MegatronExtError
from megatron_ext.tools.launch.keeper import STORES
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.transport.address import source_address
from megatron_ext.version import code_hash, installed

if TYPE_CHECKING:
    from megatron_ext.tools.launch.runs import Json

MIN_FREE_BYTES = 64 << 20
"""Space needed for the logs on a host. Less free space counts as a problem."""
MIN_SHARED_BYTES = 1 << 30
"""A host with less free shared memory gets a warning. Containers have 64 MiB by default."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
_LOWEST_PORT = 20000
_HIGHEST_PORT = 32767
"""Operating systems assign the ports above this one to outgoing connections."""


def look(request: Json, log_dir: Path) -> Json:
    """Return whether this host can run the request; its environment must already be set.

    The answer contains problems, warnings, and values that must be identical on every host. This
    call changes to the request's work directory. The log directory must not exist yet.
    """
    problems: list[str] = []
    warnings: list[str] = []
    clock_s = time.time()
    num_devices = 0
    has_count = request["per_node"] and request["nproc"]
    if not has_count:
        # Count without torch, because importing torch takes longer than all the checks
        # combined.
        num_devices = count_devices()
    python = ".".join(map(str, sys.version_info[:3]))
    hello: Json = {
        "kind": "hello",
        "pid": os.getpid(),
        "clock": clock_s,
        "log_dir": str(log_dir),
        "devices": num_devices,
        "problems": problems,
        "warnings": warnings,
        "same": {
            "python": python,
            # Source trees of the same version may differ, so compare the files.
            "megatron_ext": f"files {code_hash()}",
            "torch": installed("torch") or "not installed",
            "megatron-core": installed("megatron-core") or "not installed",
        },
    }
    try:
        # A relative script path refers to this directory.
        os.chdir(request["workdir"])
    except OSError as error:
        problems.append(
            f"cannot change to the work directory {request['workdir']}: {error.strerror}; copy it "
            f"there with rsync"
        )
    hello["free_bytes"], log_problem = _look_at_logs(log_dir)
    if log_problem is not None:
        problems.append(log_problem)
    _look_at_shared_memory(warnings)
    # Every host must find the job's command, and scripts must have identical content.
    script = request["command"][0]
    if request["per_node"]:
        if shutil.which(script) is None:
            problems.append(f"there is no command {script}; copy it there with rsync")
    elif not problems:
        # Without the work directory, a relative path would not refer to the script.
        try:
            hello["same"][f"{script}, content"] = _digest_of(script)
        except (MegatronExtError, OSError) as error:
            problems.append(f"{error}; copy it there with rsync")
    if 0 < hello["devices"] < request["nproc"]:
        problems.append(
            f"the job starts {request['nproc']} processes there, but it has {hello['devices']} "
            f"devices; lower its slots=N, or --nproc"
        )
    # Rank 0 is on the first host, so the ranks meet there.
    if request["is_first"]:
        # A job that keeps going also needs a port for each store that its keeper hosts.
        num_ports = 1 if request["reserve"] is None else 1 + len(STORES)
        hello["port"] = _free_port(request["master_port"], num_ports, problems)
    # The address that this host must use depends on the route to another host.
    if request["peer"] is not None:
        try:
            hello["address"] = source_address(request["peer"])
            hello["interface"] = interface_of(hello["address"])
        except OSError as error:
            problems.append(
                f"it cannot reach {request['peer']}: {error.strerror or error}; give that host an "
                f"address that all other hosts can reach, with addr=IP in the hostfile"
            )
    return hello


def open_folder(directory: Path, create: bool = False) -> RunFolder:
    """Open the folder for a run on this host, ROOT/RUN_ID/HOST, as `RunFolder.open` does."""
    run = directory.parent
    return RunFolder.open(run.parent, run.name, directory.name, create=create)


def _look_at_logs(log_dir: Path) -> tuple[int, str | None]:
    """Return the free bytes for a run's logs here and the reason they cannot be written, if any.

    The folder is not created, so that none is left behind if the job is rejected.
    """
    # Do not use Path.exists(), which raises an error in a folder without access
    # permission.
    existing = next(folder for folder in log_dir.parents if os.access(folder, os.F_OK))
    free_bytes = shutil.disk_usage(existing).free
    why = None
    try:
        with open_folder(log_dir):
            why = "it belongs to another run"
    except LaunchError as error:
        return free_bytes, f"logs cannot be written: {error}"
    except OSError:  # the folder does not exist yet
        if not os.access(existing, os.W_OK | os.X_OK):
            why = f"{existing} is not writable"
    if why is not None:
        remedy = "use another --run-id or --log-dir"
        return free_bytes, f"logs cannot be written to {log_dir}: {why}; {remedy}"
    if free_bytes < MIN_FREE_BYTES:
        return free_bytes, (
            f"only {free_bytes >> 20} MiB are free for logs in {existing}; free at least "
            f"{MIN_FREE_BYTES >> 20} MiB, or use another --log-dir"
        )
    return free_bytes, None


def _look_at_shared_memory(warnings: list[str]) -> None:
    if not Path(SHARED_MEMORY).is_dir():
        return
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if free_bytes < MIN_SHARED_BYTES:
        warnings.append(
            f"{free_bytes >> 20} MiB are free in {SHARED_MEMORY}, but data loaders and NCCL need "
            f"more; start the container with more (docker run --shm-size=16g)"
        )


def _digest_of(script: str) -> str:
    """Return a digest of the script that would run here, which must be the same on all hosts.

    Raises:
        MegatronExtError: The script does not exist.
        OSError: The script cannot be read.
    """
    from megatron_ext.training import runner

    path = runner.choose(script)
    content = path.read_bytes() if path else b"the wheel"
    return hashlib.sha256(content).hexdigest()[:8]


def _free_port(
    master_port: int | None,
    num_ports: int,
    problems: list[str],
) -> int:
    """Return the rendezvous port: the user's port, or the first of some free ones in a row."""
    # Rank 0 does not start listening until a few seconds later. Ports in this range are
    # never assigned automatically, so the port will most likely still be free then.
    # Choose at random, so that jobs that start at the same time choose different ports.
    # A row of ports that starts here ends at the highest port.
    highest_start = _HIGHEST_PORT + 1 - num_ports
    candidates = random.sample(range(_LOWEST_PORT, highest_start + 1), 5)
    if master_port:
        candidates = [master_port]
    for first in candidates:
        for port in range(first, first + num_ports):
            reason = _why_taken(port)
            if reason is not None:
                break
        else:
            return first
    problems.append(
        f"port {port} cannot be used for the rendezvous: {reason}; remove --master-port to get a "
        f"free one"
    )
    return port


def _why_taken(port: int) -> str | None:
    """Return why a program cannot listen on a port, or None if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return "it is in use" if error.errno == errno.EADDRINUSE else str(error)
    return None


def interface_of(address: str) -> str | None:
    """Return this machine's network interface that has this address, or None."""
    # Link-local addresses end in %INTERFACE.
    number, _, _ = address.partition("%")
    for name, interface_addresses in psutil.net_if_addrs().items():
        for entry in interface_addresses:
            entry_number, _, _ = entry.address.partition("%")
            if entry_number == number:
                return str(name)
    return None
