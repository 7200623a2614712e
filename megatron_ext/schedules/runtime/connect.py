"""Opens the transport of a configuration."""

from __future__ import annotations

import atexit
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_ext import devices
from megatron_ext.config.active import count_transport, required
from megatron_ext.schedules.representation.memory import live_counts
from megatron_ext.schedules.representation.validation import validate
from megatron_ext.schedules.search.policies import activation_cap
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport
from megatron_ext.transport.opening import open_native
from megatron_ext.transport.staging import staged
from megatron_ext.transport.torch_dist import Channel, TorchTransport

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.representation.route_plan import Route
    from megatron_ext.schedules.runtime.program import Shapes
    from megatron_ext.transport.base import Transport

__all__ = ["open_transport"]

_SLOT_BYTES = 1 << 20
"""Slot size when message sizes are unknown. Longer messages are sent in pieces."""


def open_transport(
    pipeline: Pipeline,
    device: torch.device,
    channels: Sequence[Channel],
    shapes: Shapes,
    dtype: torch.dtype,
    routes: tuple[Route, ...] = (),
) -> Transport:
    """Connect this rank to its peers. Collective over all of them.

    Args:
        pipeline: The pipeline of this run.
        device: Where to allocate received tensors.
        channels: Every channel on which this rank sends or receives.
        shapes: Shapes of the tensors that stages exchange, `[s, b, h]` each.
        dtype: Their dtype.
        routes: The model's routes.

    Raises:
        TransportError: The transport is not available here; says why.
        DeviceError: The direct path between devices is not available.
    """
    known = [shape for tensors in shapes.values() for shape in tensors]
    if pipeline.transport == "torch":
        shapes_travel = None in known
        assert dist.group.WORLD is not None
        return TorchTransport(
            dist.group.WORLD,
            device,
            channels,
            timeout_s=pipeline.timeout_s,
            shapes_travel=shapes_travel,
        )
    me = dist.get_rank()
    environment = required().environment
    backend = devices.current()
    sharing = backend.sharing(device) if pipeline.config.device_path == "ipc" else None
    host = open_native(
        dist.distributed_c10d._get_default_store(),
        me,
        {rank for channel in channels for rank in channel[:2]} - {me},
        run_id="/".join(["pipeline", *environment.run, str(count_transport("pipeline"))]),
        world_size=dist.get_world_size(),
        ranks_per_node=environment.local_world_size,
        rail=environment.local_rank,
        wire=pipeline.transport,
        node_ips=pipeline.config.node_ips,
        rendezvous_host=environment.rendezvous_host,
        slots=_slots(pipeline, routes),
        slot_bytes=NOTE_BYTES if sharing is not None else _slot_bytes(known, dtype),
        timeout_s=pipeline.timeout_s,
        checksums=pipeline.config.checksums,
    )
    transport: Transport
    if sharing is not None:
        transport = DirectTransport(
            host,
            sharing,
            me,
            timeout_s=pipeline.timeout_s,
            tells_when_there=pipeline.dynamic is not None,
        )
    else:
        transport = staged(host, backend.copies(device), timeout_s=pipeline.timeout_s)
    # Tell peers that still run that this rank exited cleanly.
    atexit.register(transport.close)
    return transport


def _slot_bytes(known: Sequence[tuple[int, ...] | None], dtype: torch.dtype) -> int:
    """Return the size in bytes of the largest tensor that stages exchange."""
    return max(
        (math.prod(shape) * dtype.itemsize for shape in known if shape is not None),
        default=_SLOT_BYTES,
    )


def _slots(pipeline: Pipeline, routes: tuple[Route, ...]) -> int:
    """Return the slots for a pair of ranks: twice its peak of messages in flight, both directions.

    The second half holds messages that have arrived and are not consumed yet.
    """
    by_pair: dict[frozenset[int], int] = defaultdict(int)
    table = replace(pipeline.full, routes=routes)
    for (source, target, _), slots in validate(table).slots.items():
        by_pair[frozenset((source, target))] += slots + _more_slots(pipeline)
    return max(2, 2 * max(by_pair.values(), default=1))


def _more_slots(pipeline: Pipeline) -> int:
    """Return the extra slots per edge for activations that a policy keeps beyond the table's peak.

    A greedy policy may keep all of them. A message without a slot waits in its sender's memory.
    """
    if pipeline.dynamic is None:
        return 0
    table = pipeline.full
    least = min(max(live_counts(row)) for row in table.rows)
    return activation_cap(table, pipeline.dynamic.margin) - least
