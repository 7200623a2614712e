"""The training flags of the transport between pipeline ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from megatron_ext.config.pipeline_config import DEVICE_PATHS, TRANSPORTS

__all__ = ["add_flags", "transport_fields"]


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


def _timeout_s(args: Namespace) -> float:
    """Return how long a rank waits for one message: Megatron's own time-out of collectives."""
    return 60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10)


def transport_fields(args: Namespace) -> dict[str, Any]:
    """Return the fields of a `PipelineConfig` about what carries tensors."""
    return {
        "transport": getattr(args, "pipeline_transport", None),
        "device_path": getattr(args, "pipeline_device_path", None) or DEVICE_PATHS[0],
        "checksums": bool(getattr(args, "pipeline_checksum", False)),
        "node_ips": tuple(getattr(args, "node_ips", None) or ()),
        "message_timeout_s": _timeout_s(args),
    }
