"""The training flags of the transport between pipeline ranks."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import TYPE_CHECKING

from megatron_ext.config.choice import DEVICE_PATHS, TRANSPORTS
from megatron_ext.errors import ArgumentsError

if TYPE_CHECKING:
    from megatron_ext.config.choice import DevicePath, TransportName

__all__ = ["add_flags", "checksums", "device_path", "node_ips", "timeout_s", "transport"]

_log = logging.getLogger(__name__)


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags that say what carries tensors."""
    group.add_argument(
        "--pipeline-transport",
        choices=TRANSPORTS,
        help="What carries tensors between pipeline ranks, also those of Megatron's own schedules: "
        "torch.distributed, or shared memory of one host, TCP or RDMA, to which tensors of a GPU "
        "get through pinned memory; auto takes for each pair of ranks the best that it has, which "
        "on the GPUs of one host is torch.distributed unless --use-dpp is given (default: "
        f"{TRANSPORTS[0]}; with --use-dpp: auto).",
    )
    group.add_argument(
        "--node-ips",
        nargs="+",
        metavar="ADDRESS",
        help="Addresses for --pipeline-transport auto, tcp and rdma: one for each node, in the "
        "order of ranks, or one for each rank (default: those on the way to MASTER_ADDR).",
    )
    group.add_argument(
        "--pipeline-device-path",
        choices=DEVICE_PATHS,
        help="How tensors of a GPU get to ranks of the same host over --pipeline-transport shm or "
        "auto: through pinned memory, or from GPU to GPU by CUDA IPC, which has to be possible "
        f"between all of them (default: {DEVICE_PATHS[0]}).",
    )
    group.add_argument(
        "--pipeline-checksum",
        action="store_true",
        help="Give the bytes of each message over --pipeline-transport auto, shm, tcp or rdma a "
        "checksum, so that faulty memory or a faulty network ends the job instead of changing it. "
        "Costs about a copy at both ends. What messages say about themselves always has one.",
    )


def timeout_s(args: Namespace) -> float:
    """Return how long a rank waits for one message: Megatron's own time-out of collectives."""
    return 60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10)


def transport(args: Namespace) -> TransportName:
    """Return what `--pipeline-transport` means here, after checking that it can be.

    Raises:
        ArgumentsError: They cannot.
    """
    name: TransportName | None = getattr(args, "pipeline_transport", None)
    if getattr(args, "use_dpp", False):
        if name == "torch":
            raise ArgumentsError(
                "--use-dpp chooses by what has arrived, which torch.distributed cannot tell; leave "
                "--pipeline-transport torch out"
            )
        name = name or "auto"
    name = name or TRANSPORTS[0]
    if name in ("torch", "shm") and node_ips(args):
        raise ArgumentsError(
            f"--node-ips is for wires between hosts, --pipeline-transport {name} has none; take "
            "--pipeline-transport auto, or leave --node-ips out"
        )
    direct = getattr(args, "pipeline_device_path", None) == "ipc"
    if name == "auto" and not getattr(args, "use_dpp", False) and not direct and _has_better(args):
        _log.info(
            "--pipeline-transport auto: torch.distributed, which moves tensors between the devices "
            "of one host without the host's memory"
        )
        return TRANSPORTS[0]
    return name


def _has_better(args: Namespace) -> bool:
    from megatron_ext.schedules.runtime import local_devices  # the runtime knows devices

    return local_devices.reach_each_other(int(getattr(args, "world_size", None) or 1))


def device_path(args: Namespace, name: TransportName) -> DevicePath:
    """Return what `--pipeline-device-path` means with a transport, after checking that it can be.

    Raises:
        ArgumentsError: The transport has no such path.
    """
    path: DevicePath = getattr(args, "pipeline_device_path", None) or DEVICE_PATHS[0]
    if path == "ipc" and name not in ("shm", "auto"):
        raise ArgumentsError(
            f"--pipeline-device-path ipc goes with shared memory, --pipeline-transport is {name}; "
            "add --pipeline-transport shm, or leave --pipeline-device-path out"
        )
    return path


def checksums(args: Namespace, name: TransportName) -> bool:
    """Return what `--pipeline-checksum` means with a transport, after checking that it can be.

    Raises:
        ArgumentsError: The bytes of its messages do not pass the native core.
    """
    if not getattr(args, "pipeline_checksum", False):
        return False
    if name == "torch":
        raise ArgumentsError(
            "--pipeline-checksum is for messages of this package, --pipeline-transport is torch; "
            "add --pipeline-transport shm, tcp or rdma, or leave --pipeline-checksum out"
        )
    if getattr(args, "pipeline_device_path", None) == "ipc":
        raise ArgumentsError(
            "--pipeline-checksum covers what goes through the host, --pipeline-device-path ipc "
            "goes past it; leave one of them out"
        )
    return True


def node_ips(args: Namespace) -> tuple[str, ...]:
    """Return `--node-ips`."""
    return tuple(getattr(args, "node_ips", None) or ())
