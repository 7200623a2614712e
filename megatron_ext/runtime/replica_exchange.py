"""Shares out the micro-batches of a step between data-parallel replicas, before they run.

`--pipeline-balance pack`: each replica reads its micro-batches as ever, so data loaders, what a
checkpoint says about them, and the global batch stay as they are. Then the replicas tell each other
what their micro-batches cost, all compute the same shares, and what changes its replica is sent.

A rank does that when it first reads data in a step. No rank can wait for another in a circle: the
first reading of a stage depends on stages before it alone, in each replica. The groups are gloo's
and used for nothing else: the data are on the host, and gradients never wait behind them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import ScheduleError, TransportError
from megatron_ext.schedules.search.length_balance import deal_out

__all__ = ["ReplicaExchange"]


@dataclass(frozen=True)
class ReplicaExchange:
    """The data-parallel replicas of this rank's stages.

    Micro-batches have the numbers that Megatron's samplers give them: of `size` replicas, replica r
    reads r, r + size, r + 2 * size and so on.
    """

    group: dist.ProcessGroup
    """Of the ranks with the same stages in all replicas, over gloo."""
    device: torch.device
    """Where tensors go that were on a device of the sender."""

    @property
    def rank(self) -> int:
        """Which replica this is."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return self.group.size()

    def costs(self, mine: Sequence[float]) -> list[float]:
        """Return what the micro-batches of all replicas cost, by number. Collective.

        Args:
            mine: Those of this replica; NaN: it could not read them, and says why itself.

        Raises:
            ScheduleError: Another replica could not read its micro-batches.
            TransportError: Another replica does not answer.
        """
        told = torch.tensor(mine, dtype=torch.float64)
        rows = [torch.empty_like(told) for _ in range(self.size)]
        with self._waiting("what their micro-batches cost"):
            dist.all_gather(rows, told, group=self.group)
        found: list[float] = torch.stack(rows, dim=1).flatten().tolist()
        failed = [r for r, row in enumerate(rows) if r != self.rank and bool(row.isnan().any())]
        if failed and not math.isnan(mine[0]):
            raise ScheduleError(
                f"--pipeline-balance pack: data-parallel rank {failed[0]} could not read its "
                "micro-batches of this step; its own line says why"
            )
        return found

    def shared_out(
        self, held: Mapping[int, Any], costs: Sequence[float], fills: float
    ) -> dict[int, Any]:
        """Return the micro-batches that this replica runs, by number. Collective.

        Args:
            held: Those that it has read, by number.
            costs: Of all replicas' micro-batches, by number.
            fills: How many micro-batches the pipeline takes to fill and drain.

        Raises:
            TransportError: Another replica does not answer.
        """
        shares = deal_out(costs, self.size, fills)
        if all(number % self.size == r for r, share in enumerate(shares) for number in share):
            return dict(held)
        kept = {number: held[number] for number in shares[self.rank] if number in held}
        sent = [{number: held[number] for number in share if number in held} for share in shares]
        sent[self.rank] = {}
        for received in self._swapped([_packed(items) for items in sent]):
            kept |= self._unpacked(received)
        return kept

    def _swapped(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send each replica its part, and return what each has sent."""
        sizes = torch.tensor(list(map(len, parts)))
        by_sender = [torch.empty_like(sizes) for _ in parts]
        together = bytearray(b"".join(parts))
        outgoing = torch.empty(0, dtype=torch.uint8)
        if together:
            outgoing = torch.frombuffer(together, dtype=torch.uint8)
        with self._waiting("their micro-batches"):
            dist.all_gather(by_sender, sizes, group=self.group)
            coming = [int(row[self.rank]) for row in by_sender]
            incoming = torch.empty(sum(coming), dtype=torch.uint8)
            dist.all_to_all_single(incoming, outgoing, coming, sizes.tolist(), group=self.group)
        return [part.numpy().tobytes() for part in incoming.split(coming)]

    def _unpacked(self, part: bytes) -> dict[int, Any]:
        if not part:
            return {}
        found: dict[int, Any] = torch.load(
            io.BytesIO(part), map_location=self._placed, weights_only=False
        )
        return found

    def _placed(self, storage: Any, location: str) -> Any:
        """Put a storage where the sender had it: on the host, or on the device of this rank."""
        return storage if location == "cpu" else storage.to(device=self.device)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self.group)))
            raise TransportError(
                f"--pipeline-balance pack: ranks {ranks} could not tell each other {what}: "
                f"{str(error).splitlines()[0]}"
            ) from error


def _packed(items: dict[int, Any]) -> bytes:
    if not items:
        return b""
    buffer = io.BytesIO()
    torch.save(items, buffer)
    return buffer.getvalue()
