"""Connects a process of a disaggregated job with its neighbours of both roles.

The executor, the transfer of new weights and the exchanges between steps share one transport,
`wire`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_ext.config.active import required
from megatron_ext.disaggregation.ranks import Place
from megatron_ext.disaggregation.worlds import roles_in_force
from megatron_ext.errors import TransportError
from megatron_ext.runtime.connect import open_native, through_host
from megatron_ext.transport.observed import observed

if TYPE_CHECKING:
    import torch

    from megatron_ext.disaggregation.job import Job
    from megatron_ext.message import Message
    from megatron_ext.transport.base import Transport

# Time within which the death of a neighbour is detected.
_NOTICED_S = 2.0


class RoleLink:
    """The connections of one process to its neighbours, by global ranks.

    Raises:
        TransportError: A neighbour does not connect, or the wire cannot reach it.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        config = required().config
        assert config.wire != "torch", "the configuration refuses it"
        host = open_native(
            "roles",
            roles_in_force().store,
            job.rank,
            job.ranks.num_ranks,
            _neighbours(job),
            wire=config.wire,
            slots=job.window + 2,  # a message may stay in its slot while computation uses it
            slot_bytes=job.message_bytes,
            timeout_s=job.timeout_s,
            device=device,
        )
        # Through host memory: the configuration refuses `device_path` ipc here.
        transport = through_host(host, device, job.timeout_s)
        self.wire: Transport = observed(transport, required().observers)

    def recv_from(self, rank: int, message: Message) -> torch.Tensor:
        """Receive a tensor from a global rank, onto the device of this process.

        Raises:
            TransportError: It did not arrive in time, or the peer is gone; names both processes.
        """
        try:
            return self.wire.recv(rank, message, self._job.timeout_s).to(self._device)
        except TransportError as error:
            raise type(error)(
                f"{self.name_of(None)} waits for {self.name_of(rank)}: {error}"
            ) from error

    def name_of(self, rank: int | None) -> str:
        """Return the name of a global rank for error messages; None: this process."""
        place = self._job.place if rank is None else self._job.ranks.place(rank)
        number = self._job.rank if rank is None else rank
        return (
            f"{place.role} rank {number} (stage {place.pp}, replica {place.dp}, shard {place.tp})"
        )

    @contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Name the dead neighbour if torch.distributed, which names no rank, fails in the block.

        Raises:
            TransportError: A neighbour has died; the message names it.
        """
        try:
            yield
        except RuntimeError as error:
            # It fails on a rank whose neighbour is gone, and this transport knows which.
            try:
                self.wire.poll(_NOTICED_S)
            except TransportError as found:
                self.wire.abort(str(found))
                raise found from error
            self.wire.abort(str(error))
            raise


def _neighbours(job: Job) -> list[int]:
    """Return the global ranks of all neighbours; the relation is symmetric."""
    # The same stage of the other role (of all replicas, if each has a shard of the weights), and
    # the adjacent stages of both roles.
    place, ranks = job.place, job.ranks
    found = {ranks.rank(twin) for twin in job.weight_partners}
    for stage in {place.pp - 1, place.pp + 1} & set(range(ranks.pp)):
        there = Place(place.role, place.dp, stage, place.tp)
        found.add(ranks.rank(there))
        found |= {ranks.rank(twin) for twin in ranks.twins(there)}
    return sorted(found)
