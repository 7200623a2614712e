"""Connects a process of a disaggregated job with its neighbours of both roles.

The executor, the transfer of new weights and the exchanges between steps share this transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_ext.config.active import name_transport, required
from megatron_ext.disaggregation.worlds import roles_in_force
from megatron_ext.errors import TransportError
from megatron_ext.runtime.connect import open_native, through_host
from megatron_ext.transport.base import find_lost_peer
from megatron_ext.transport.observed import observed

if TYPE_CHECKING:
    import torch

    from megatron_ext.config.roles import Job
    from megatron_ext.transport.base import Transport

# Time within which the death of a neighbour is detected.
_NOTICED_S = 2.0


def open_wire(job: Job, device: torch.device) -> Transport:
    """Connect a process with its neighbours, by global ranks.

    Raises:
        TransportError: A neighbour does not connect, or the wire cannot reach it.
    """
    config = required().config
    assert config.wire != "torch", "the configuration refuses it"
    # The same stage of the other role (of all replicas, if each has a shard of the weights), and
    # the adjacent stages of both roles. The relation is symmetric.
    place, ranks = job.place, job.ranks
    neighbours = {ranks.rank(twin) for twin in job.weight_partners}
    for stage in {place.pp - 1, place.pp + 1} & set(range(ranks.pp)):
        there = place._replace(pp=stage)
        neighbours |= {ranks.rank(each) for each in (there, *ranks.twins(there))}
    host = open_native(
        name_transport("roles"),
        roles_in_force().store,
        job.rank,
        ranks.num_ranks,
        sorted(neighbours),
        wire=config.wire,
        slots=job.window + 2,  # a message may stay in its slot while computation uses it
        slot_bytes=job.message_bytes,
        timeout_s=job.timeout_s,
        device=device,
    )
    # Through host memory: the configuration refuses `device_path` ipc here.
    return observed(through_host(host, device, job.timeout_s), required().observers)


@contextmanager
def explaining_failures(wire: Transport) -> Iterator[None]:
    """Name the dead neighbour if torch.distributed, which names no rank, fails in the block.

    Raises:
        TransportError: A neighbour has died; the message names it.
    """
    try:
        yield
    except RuntimeError as error:
        # It fails on a rank whose neighbour is gone, and this transport knows which.
        try:
            find_lost_peer(wire, _NOTICED_S)
        except TransportError as found:
            wire.abort(str(found))
            raise found from error
        wire.abort(str(error))
        raise
