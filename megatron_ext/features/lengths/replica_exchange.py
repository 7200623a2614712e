"""Exchanges a step's micro-batches between data-parallel replicas to balance their costs."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import ScheduleError, TransportError
from megatron_ext.features.lengths.length_balance import deal_out


@dataclass(frozen=True)
class ReplicaExchange:
    """The data-parallel replicas of this rank's stages, which redistribute their micro-batches.

    Micro-batches are numbered as in Megatron's samplers: replica r of n reads micro-batches r,
    r + n, ...
    """

    group: dist.ProcessGroup
    """Gloo group of the ranks that hold the same stages across all replicas."""
    device: torch.device
    """This rank's device, for received tensors that were on one of the sender's devices."""

    def costs(self, own_costs: Sequence[float]) -> list[float]:
        """Return the costs of all replicas' micro-batches by number. Collective over `group`.

        This replica contributes `own_costs`. NaN means that this replica could not read its
        micro-batches, in which case its caller raises the actual error after this call.

        Raises:
            ScheduleError: Another replica could not read its micro-batches.
            TransportError: Another replica does not respond.
        """
        # As float64, costs arrive unchanged, so all replicas compute the same shares
        # from them.
        own_row = torch.tensor(own_costs, dtype=torch.float64)
        num_replicas = self.group.size()
        rows = [torch.empty_like(own_row) for _ in range(num_replicas)]
        with self._waiting("the costs of their micro-batches"):
            dist.all_gather(rows, own_row, group=self.group)
        # Replica r reads micro-batches r, r + n and so on, so interleave the rows.
        interleaved = torch.stack(rows, dim=1).flatten()
        costs: list[float] = interleaved.tolist()
        failed_ranks = []
        for rank, row in enumerate(rows):
            if bool(row.isnan().any()):
                failed_ranks.append(rank)
        # The replica that failed returns normally, and its caller raises the actual
        # error.
        if failed_ranks and not math.isnan(own_costs[0]):
            raise ScheduleError(
                f"--pipeline-balance pack: data-parallel rank {failed_ranks[0]} could not read "
                "this step's micro-batches; see that rank's error"
            )
        return costs

    def shared_out(
        self,
        held: Mapping[int, Any],
        costs: Sequence[float],
        fills: float,
    ) -> dict[int, Any]:
        """Return the micro-batches that this replica runs, by number. Collective over `group`.

        Args:
            held: The micro-batches that this replica has read, by number.
            costs: The costs of all replicas' micro-batches, by number.
            fills: Time to fill and drain the pipeline, in micro-batches.

        Raises:
            ScheduleError: A micro-batch contains something other than tensors and plain data.
            TransportError: Another replica does not respond.
        """
        # Each replica reads its usual micro-batches, so data loaders, checkpoints and
        # the global batch do not change. All replicas compute the same shares and send
        # off the micro-batches that other replicas run.
        shares = deal_out(costs, self.group.size(), fills)
        # All replicas have the same shares, so either all of them return here or none
        # do.
        if self._leaves_all_in_place(shares):
            return dict(held)
        # [receiving replica] -> the items that it receives from this replica
        sent: list[dict[int, Any]] = []
        for share in shares:
            items = {number: held[number] for number in share if number in held}
            sent.append(items)
        # This replica keeps its own part.
        own_rank = self.group.rank()
        own_items = sent[own_rank]
        sent[own_rank] = {}
        placed = partial(_placed, self.device)
        # Do not name the packed parts: they would stay in memory while the received ones are read.
        received_parts = self._swapped([_packed(items) for items in sent])
        for received in received_parts:
            if received:
                own_items |= torch.load(
                    io.BytesIO(received),
                    map_location=placed,
                    weights_only=True,
                )
        return own_items

    def _leaves_all_in_place(self, shares: Sequence[Sequence[int]]) -> bool:
        """Return whether every replica runs exactly the micro-batches that it has read."""
        num_replicas = len(shares)
        for replica, share in enumerate(shares):
            for number in share:
                reader = number % num_replicas
                if reader != replica:
                    return False
        return True

    def _swapped(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send one part to each replica and return the parts received from all replicas."""
        own_rank = self.group.rank()
        sizes = torch.tensor([len(part) for part in parts])
        by_sender = [torch.empty_like(sizes) for _ in parts]
        # `frombuffer` warns about read-only bytes and rejects an empty buffer.
        together = bytearray(b"".join(parts))
        outgoing = torch.empty(0, dtype=torch.uint8)
        if together:
            outgoing = torch.frombuffer(together, dtype=torch.uint8)
        with self._waiting("their micro-batches"):
            # Exchange the sizes first, so that each replica can allocate its buffer.
            dist.all_gather(by_sender, sizes, group=self.group)
            incoming_sizes = [int(row[own_rank]) for row in by_sender]
            incoming = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
            dist.all_to_all_single(
                incoming,
                outgoing,
                incoming_sizes,
                sizes.tolist(),
                group=self.group,
            )
        received_parts = incoming.split(incoming_sizes)
        return [part.numpy().tobytes() for part in received_parts]

    @contextmanager
    def _waiting(self, subject: str) -> Iterator[None]:
        """Convert errors of collectives, such as a time-out, into a `TransportError`."""
        try:
            yield
        except RuntimeError as error:
            members = dist.get_process_group_ranks(self.group)
            ranks = ", ".join(map(str, members))
            reason = str(error).splitlines()[0]
            raise TransportError(
                f"--pipeline-balance pack: ranks {ranks} could not exchange {subject}: "
                f"{reason}"
            ) from error


def _placed(device: torch.device, storage: Any, location: str) -> Any:
    """Return a storage on the host or this rank's device, to match the sender's storage."""
    if location == "cpu":
        return storage
    # A location such as cuda:1 is the sender's device, so use this rank's device instead.
    return storage.to(device=device)


def _packed(items: dict[int, Any]) -> bytes:
    if not items:
        return b""
    buffer = io.BytesIO()
    torch.save(items, buffer)
    buffer.seek(0)
    # The receiver unpickles with `weights_only`, so reject other types here, where they originate.
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if refused:
        raise ScheduleError(
            f"--pipeline-balance pack: a micro-batch contains {refused[0]}, but replicas exchange "
            "only tensors, numbers, strings, and tuples, lists and dicts of these; convert it "
            "where the data is read, or use --pipeline-balance order"
        )
    return buffer.getvalue()
