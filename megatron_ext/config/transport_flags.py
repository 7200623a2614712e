"""The training flags of the transport between pipeline ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from megatron_ext.config.pipeline_config import DEVICE_PATHS, TRANSPORTS

__all__ = ["add_flags", "transport_fields"]


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags of the transport."""
    group.add_argument(
        "--pipeline-transport",
        choices=TRANSPORTS,
        help="Transport between pipeline ranks, under Megatron's own schedules too: "
        "torch.distributed, shared memory of one host, TCP or RDMA; over the last three, GPU "
        "tensors go through pinned memory. auto picks the best for each pair of ranks: GPUs of one "
        "host exchange tensors directly if they can; other pairs use torch.distributed, or RDMA or "
        "TCP with --use-dpp (default: "
        f"{TRANSPORTS[0]}; with --use-dpp: auto).",
    )
    group.add_argument(
        "--node-ips",
        nargs="+",
        metavar="ADDRESS",
        help="Addresses for --pipeline-transport auto, tcp and rdma: one for each node, in the "
        "order of ranks, or one for each rank (default: those on the route to MASTER_ADDR).",
    )
    group.add_argument(
        "--pipeline-device-path",
        choices=DEVICE_PATHS,
        help="How GPU tensors reach ranks of the same host over --pipeline-transport shm or auto: "
        "staged through pinned memory, or from GPU to GPU by CUDA IPC, which every pair of GPUs "
        "must support. auto: under --pipeline-transport auto by CUDA IPC where a pair can, "
        f"otherwise staged (default: {DEVICE_PATHS[0]}).",
    )
    group.add_argument(
        "--pipeline-checksum",
        action="store_true",
        help="Checksum the bytes of each message over --pipeline-transport auto, shm, tcp or rdma, "
        "so that faulty memory or a faulty network ends the job instead of changing its results. "
        "Costs about a copy at both ends. Descriptors of messages always have a checksum.",
    )


def _timeout_s(args: Namespace) -> float:
    """Return the time-out of one message: Megatron's own time-out of collectives."""
    return 60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10)


def transport_fields(args: Namespace) -> dict[str, Any]:
    """Return the fields of a `PipelineConfig` about the transport."""
    return {
        "transport": getattr(args, "pipeline_transport", None),
        "device_path": getattr(args, "pipeline_device_path", None) or DEVICE_PATHS[0],
        "checksums": bool(getattr(args, "pipeline_checksum", False)),
        "node_ips": tuple(getattr(args, "node_ips", None) or ()),
        "message_timeout_s": _timeout_s(args),
    }
