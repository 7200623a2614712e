"""Carries tensors between the rows of a disaggregated table.

One transport connects a process with its neighbours of both roles. Here a neighbour is a row of the
table; which process that is, and which slice of a tensor it needs where forward ranks stand in for
tensor-parallel ranks, is worked out in one place. Wires carry what is in the host's memory, so
roles may compute on different devices.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from megatron_ext import devices
from megatron_ext.disaggregation.ranks import Place
from megatron_ext.disaggregation.worlds import shared_store
from megatron_ext.errors import TransportError
from megatron_ext.trace.observed import observed_transport
from megatron_ext.transport.address import node_address
from megatron_ext.transport.native_transport import NativeTransport
from megatron_ext.transport.staging import staged

if TYPE_CHECKING:
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.transport.base import Expected, Key, Transport

__all__ = ["RoleLink"]

_NOTICED_S = 2.0
"""By then the death of a neighbour is known."""
_HOST = torch.device("cpu")
_opened = itertools.count()


class RoleLink:
    """What one process sends to and receives from the processes next to it.

    Args:
        job: Whose table it is.
        device: Where this process computes.

    Raises:
        TransportError: A neighbour does not come, or cannot be reached by the wire.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self.wire: Transport = observed_transport(_open(job, device))

    def source(self, row: int) -> int:
        """Return the global rank of a row of the table that sends to this process."""
        return self._job.peer(row, self._shard(row))

    def targets(self, row: int) -> list[int]:
        """Return the global ranks of a row of the table that this process sends to."""
        job = self._job
        fans_out = job.ranks.merged and job.role == "forward" and row >= job.ranks.pp
        shards = range(job.ranks.tp) if fans_out else [self._shard(row)]
        return [job.peer(row, shard) for shard in shards]

    def _shard(self, row: int) -> int:
        merged = self._job.ranks.merged and row < self._job.ranks.pp
        return 0 if merged else self._job.place.tp

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step; sources are global ranks."""
        self.wire.begin(expected, slots)

    def send(
        self, tensor: torch.Tensor, row: int, key: Key, *, sequence_dim: int | None = 0
    ) -> None:
        """Send a tensor to a row of the table; each tensor-parallel rank gets what it needs.

        Args:
            tensor: Its storage is kept until it has left.
            row: Of the table.
            key: What it is.
            sequence_dim: Which dimension tensor-parallel ranks may share out; None: none.
        """
        targets = self.targets(row)
        parts: Sequence[torch.Tensor] = [tensor] * len(targets)
        if len(targets) > 1 and self._job.sequence_parallel and sequence_dim is not None:
            parts = tensor.chunk(len(targets), sequence_dim)
        for target, part in zip(targets, parts, strict=True):
            self.wire.isend(part.detach(), target, key)

    def recv(self, row: int, key: Key) -> torch.Tensor:
        """Return a tensor of a row of the table, on the device of this process."""
        return self.recv_from(self.source(row), key)

    def recv_from(self, rank: int, key: Key) -> torch.Tensor:
        """Return a tensor of a global rank, on the device of this process.

        Raises:
            TransportError: It did not come in time, or the peer is gone; names both processes.
        """
        try:
            return self.wire.recv(rank, key, self._job.timeout_s).to(self._device)
        except TransportError as error:
            raise type(error)(
                f"{_described(self._job, self._job.rank)} waits for "
                f"{_described(self._job, rank)}: {error}"
            ) from error

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self.wire.flush(self._job.timeout_s)

    @contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Find out whose death makes torch.distributed fail inside the block, which names no rank.

        Raises:
            TransportError: A neighbour has died; names it.
        """
        try:
            yield
        except RuntimeError as error:
            try:
                self.wire.poll(_NOTICED_S)
            except TransportError as found:
                self.abort(str(found))
                raise found from error
            self.abort(str(error))
            raise

    def abort(self, reason: str) -> None:
        """Give the job up, and tell the neighbours why."""
        self.wire.abort(reason)


def _described(job: Job, rank: int) -> str:
    place = job.ranks.place(rank)
    return f"{place.role} rank {rank} (stage {place.pp}, replica {place.dp}, shard {place.tp})"


def _open(job: Job, device: torch.device) -> Transport:
    size = job.ranks.num_ranks
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    names = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    host = NativeTransport(
        shared_store(),
        job.rank,
        _neighbours(job),
        run_id="/".join(["fbd", *names, str(next(_opened))]),
        device=_HOST,
        wire=job.wire,
        ip=node_address(job.node_ips, job.rank, size, per_node),
        slots=job.window + 2,  # a message may stay in its slot while it is computed with
        slot_bytes=job.message_bytes,
        connect_timeout_s=job.timeout_s,
        checksums=job.checksums,
    )
    transport = staged(host, devices.current().copies(device), timeout_s=job.timeout_s)
    atexit.register(transport.close)
    return transport


def _neighbours(job: Job) -> list[int]:
    """Return everybody that messages are exchanged with, the same from both sides.

    Those are the stages next to this one of either role, and the same stage of the other role.
    Weights may come from all replicas.
    """
    place, ranks = job.place, job.ranks
    found = {ranks.rank(twin) for twin in job.weight_partners}
    for stage in {place.pp - 1, place.pp + 1} & set(range(ranks.pp)):
        there = Place(place.role, place.dp, stage, place.tp)
        found.add(ranks.rank(there))
        found |= {ranks.rank(twin) for twin in ranks.twins(there)}
    return sorted(found)
