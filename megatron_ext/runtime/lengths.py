"""Micro-batches of unequal lengths: checked, ordered by cost, and dealt out to replicas.

`--pipeline-balance` reads the micro-batches of a step ahead. `order` runs them in the order that a
simulation of the table finds shortest. `pack` first deals them out to the data-parallel replicas,
so that none has more work than the others.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_ext.devices import device_of
from megatron_ext.errors import ScheduleError, TransportError
from megatron_ext.schedules.search.length_balance import LengthCost, best_order, deal_out, fills_of

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs


@contextmanager
def refusing_long_sequences(
    model: torch.nn.Module, stage: int, microbatch: int, cp_size: int
) -> Iterator[None]:
    """Check the tokens that a first stage reads inside the block, which upstream does not.

    Raises:
        ScheduleError: A sequence has more tokens than the model has positions.
    """
    # Too long a sequence would end in an index error of the embedding (on a GPU in an assertion of
    # the device), or with rotary embeddings not at all.
    reader = unwrap_model(model)
    limit = getattr(reader, "max_sequence_length", None)
    if limit is None or not getattr(reader, "pre_process", False):
        yield
        return

    def check(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        packed = kwargs.get("packed_seq_params")
        longest = 0
        if tokens is not None:
            longest = tokens.shape[-1] * cp_size
        if packed is not None and packed.max_seqlen_q is not None:
            longest = int(packed.max_seqlen_q)
        elif packed is not None and packed.cu_seqlens_q is not None:
            longest = int(packed.cu_seqlens_q.diff().max())
        if longest > limit:
            raise ScheduleError(
                f"stage {stage}, micro-batch {microbatch}: a sequence has {longest} tokens, the "
                f"model has {limit} positions; cut or pack the data to that, or raise "
                "--max-position-embeddings"
            )

    with reader.register_forward_pre_hook(check, with_kwargs=True):
        yield


class ItemSize(NamedTuple):
    """Size of a micro-batch, from which its cost follows."""

    tokens: int
    """All, padding too."""
    pairs: int
    """Pairs of tokens of one sample: the sum of the squares of lengths."""


def item_size(item: Any) -> ItemSize | None:
    """Return the size of a micro-batch; None: it holds no lengths.

    It has `tokens`, `[b, s]`, or for packed samples `cu_seqlens`, `[n]` or `[b, n]`: where each
    begins and the last one ends, which may repeat. `cu_seqlens_padded` has the same with padding.
    """
    if not isinstance(item, Mapping):
        return None
    # With Megatron's packing scheduler middle stages read only the bounds. With those of the padded
    # samples they find what stages with tokens find, or the stages would choose different orders.
    tokens = item.get("tokens")
    bounds = item.get("cu_seqlens_padded")
    if bounds is None:
        bounds = item.get("cu_seqlens")
    if bounds is None:
        if tokens is None:
            return None
        return ItemSize(tokens.numel(), tokens.numel() * int(tokens.shape[-1]))
    lengths = bounds.long().diff(dim=-1)
    num_pairs = int(lengths.square().sum())
    if tokens is None:
        return ItemSize(int(bounds[..., -1].sum()), num_pairs)
    return ItemSize(tokens.numel(), num_pairs)


def cost_of_model(config: Any) -> LengthCost:
    """Return what a length costs in a model with this `TransformerConfig`."""
    num_experts, ffn_width = 1, config.ffn_hidden_size
    if config.num_moe_experts:
        num_experts = config.moe_router_topk
        ffn_width = config.moe_ffn_hidden_size or ffn_width
    shared_width = config.moe_shared_expert_intermediate_size or 0
    return LengthCost.of_model(
        config.hidden_size,
        num_experts * ffn_width + shared_width,
        gated=bool(config.gated_linear_unit),
        query_width=config.kv_channels * config.num_attention_heads,
        key_width=config.kv_channels * (config.num_query_groups or config.num_attention_heads),
    )


def item_cost(item: Any, cost: LengthCost) -> float:
    """Return what a micro-batch costs, of which the data iterator gives what `item_size` reads.

    Raises:
        ScheduleError: The item does not say how long its samples are.
    """
    size = item_size(item)
    if size is not None:
        return cost.linear * size.tokens + cost.quadratic * size.pairs
    contents = f"a {type(item).__name__}"
    if isinstance(item, Mapping) and item:
        contents = ", ".join(str(name) for name in item)
    raise ScheduleError(
        f"--pipeline-balance needs the lengths of micro-batches, from tokens or cu_seqlens of what "
        f"the data iterator gives, which is {contents}; leave --pipeline-balance out"
    )


@dataclass
class BalancedStep:
    """The order of one training step on this rank.

    The file's micro-batch `order[i]` runs as micro-batch i of the table.
    """

    schedule: Schedule
    costs: Costs
    length_cost: LengthCost
    replicas: ReplicaExchange | None = None
    """Replicas that share out their micro-batches; None: this one runs what it reads."""
    order: tuple[int, ...] | None = field(default=None, init=False)
    """By micro-batch of the table: its number in the file, which counts the micro-batches of all
    `replicas`; None: no data was read so far."""
    _received: dict[int, Any] | None = field(default=None, init=False)
    """With `replicas`: what this replica runs, by number."""

    def iterator(self, items: Any) -> Iterator[Any] | None:
        """Return an iterator over a chunk's micro-batches in the order of the step.

        The first `next` fetches all from `items`, Megatron's data iterator; None: it has no data.

        Raises:
            ScheduleError: The data come from something else.
        """
        if items is None:
            return None
        if not hasattr(items, "__next__"):
            raise ScheduleError(
                f"--pipeline-balance reads the micro-batches of a step ahead, which a "
                f"{type(items).__name__} does not allow; leave --pipeline-balance out"
            )
        return self._ordered(items)

    def _ordered(self, items: Iterator[Any]) -> Iterator[Any]:
        # Chunks of one rank read the same data; the first of them decides.
        held = self._decided(items) if self.order is None else self._fetched(items)
        if self._received is not None:
            # Forward steps write into what they read, and the next chunk reads it too.
            held = {number: copy(item) for number, item in self._received.items()}
        assert self.order is not None
        for number in self.order:
            yield held.pop(number)

    def _decided(self, items: Iterator[Any]) -> dict[int, Any]:
        """Choose the micro-batches and their order; return them by number."""
        # All ranks that read data see the same lengths, so they choose the same order without a
        # message; ranks that read none keep the table's. The gradient is the same sum, in this
        # order.
        replicas, num_microbatches = self.replicas, self.schedule.num_microbatches
        try:
            held = self._fetched(items)
            costs = [item_cost(item, self.length_cost) for item in held.values()]
        except Exception:
            if replicas is not None:
                replicas.costs([nan] * num_microbatches)  # the others wait for it
            raise
        if replicas is not None:
            # A rank comes here when it first reads data in a step. No circle of waits can arise:
            # the first reading of a stage depends on stages before it alone, in each replica.
            costs = replicas.costs(costs)
            held = replicas.shared_out(held, costs, fills_of(self.schedule.placement))
            self._received = held
        numbers = sorted(held)
        places = best_order(self.schedule, [costs[number] for number in numbers], self.costs)
        self.order = tuple(numbers[place] for place in places)
        return held

    def _fetched(self, items: Iterator[Any]) -> dict[int, Any]:
        """Fetch the micro-batches of the step, by number in the file."""
        held: dict[int, Any] = {}
        num_microbatches = self.schedule.num_microbatches
        first, step = 0, 1
        if self.replicas is not None:
            first, step = self.replicas.group.rank(), self.replicas.group.size()
        try:
            for place in range(num_microbatches):
                held[first + step * place] = next(items)  # RerunDataIterator has no __iter__
        except StopIteration:
            raise ScheduleError(
                f"the data ended after {len(held)} of {num_microbatches} micro-batches of a step; "
                "train fewer iterations, or give more data"
            ) from None
        return held

    def in_file_order(
        self,
        reports: Mapping[int, Any],
        tensor_parallel: dist.ProcessGroup,
        chunks: Sequence[torch.nn.Module],
    ) -> dict[int, Any]:
        """Return reports by micro-batch of the table as reports by micro-batch of the file.

        Collective over the tensor-parallel group where there are reports: of its ranks the first
        reads data. It communicates on the device of the model's `chunks`.
        """
        if not reports:
            return {}
        order = list(self.order or range(self.schedule.num_microbatches))
        if tensor_parallel.size() > 1:
            shared = torch.tensor(order, device=device_of(chunks))
            source = dist.get_process_group_ranks(tensor_parallel)[0]
            dist.broadcast(shared, source, group=tensor_parallel)
            order = shared.tolist()
        return {order[microbatch]: report for microbatch, report in reports.items()}


@dataclass(frozen=True)
class ReplicaExchange:
    """The data-parallel replicas of this rank's stages, which share out their micro-batches.

    Micro-batches are numbered as by Megatron's samplers: of n replicas, r reads r, r + n, ...
    """

    group: dist.ProcessGroup
    """Of the ranks with the same stages in all replicas, over gloo."""
    device: torch.device
    """Where tensors go that were on a device of the sender."""

    def costs(self, own_costs: Sequence[float]) -> list[float]:
        """Return the costs of all replicas' micro-batches, by number. Collective.

        This replica gives its own; NaN: it could not read them, and raises the reason itself.

        Raises:
            ScheduleError: Another replica could not read its micro-batches.
            TransportError: Another replica does not answer.
        """
        own_row = torch.tensor(own_costs, dtype=torch.float64)
        rows = [torch.empty_like(own_row) for _ in range(self.group.size())]
        with self._waiting("what their micro-batches cost"):
            dist.all_gather(rows, own_row, group=self.group)
        costs: list[float] = torch.stack(rows, dim=1).flatten().tolist()
        failed = [rank for rank, row in enumerate(rows) if bool(row.isnan().any())]
        # The replica that failed raises its own reason.
        if failed and not math.isnan(own_costs[0]):
            raise ScheduleError(
                f"--pipeline-balance pack: data-parallel rank {failed[0]} could not read its "
                "micro-batches of this step; its own line says why"
            )
        return costs

    def shared_out(
        self, held: Mapping[int, Any], costs: Sequence[float], fills: float
    ) -> dict[int, Any]:
        """Return the micro-batches that this replica runs, by number. Collective.

        `held` are those that it has read; `costs` are of all. The pipeline takes `fills`
        micro-batches to fill and drain.

        Raises:
            ScheduleError: A micro-batch holds other things than tensors and plain data.
            TransportError: Another replica does not answer.
        """
        # Each replica has read its own micro-batches as ever, so data loaders, checkpoints and the
        # global batch stay as they are; all compute these shares, and send what another one runs.
        shares = deal_out(costs, self.group.size(), fills)
        if self._leaves_all_in_place(shares):
            return dict(held)
        sent: list[dict[int, Any]] = []
        for share in shares:
            sent.append({number: held[number] for number in share if number in held})
        own_items, sent[self.group.rank()] = sent[self.group.rank()], {}
        placed = partial(_placed, self.device)
        for received in self._swapped([_packed(items) for items in sent]):
            if received:
                stream = io.BytesIO(received)
                own_items |= torch.load(stream, map_location=placed, weights_only=True)
        return own_items

    def _leaves_all_in_place(self, shares: Sequence[Sequence[int]]) -> bool:
        """Return whether each replica runs what it has read."""
        for replica, share in enumerate(shares):
            if any(number % len(shares) != replica for number in share):
                return False
        return True

    def _swapped(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send each replica its part, and return what each has sent."""
        sizes = torch.tensor([len(part) for part in parts])
        by_sender = [torch.empty_like(sizes) for _ in parts]
        together = bytearray(b"".join(parts))
        outgoing = torch.empty(0, dtype=torch.uint8)
        if together:
            outgoing = torch.frombuffer(together, dtype=torch.uint8)
        with self._waiting("their micro-batches"):
            dist.all_gather(by_sender, sizes, group=self.group)
            coming = [int(row[self.group.rank()]) for row in by_sender]
            incoming = torch.empty(sum(coming), dtype=torch.uint8)
            dist.all_to_all_single(incoming, outgoing, coming, sizes.tolist(), group=self.group)
        return [part.numpy().tobytes() for part in incoming.split(coming)]

    @contextmanager
    def _waiting(self, subject: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self.group)))
            raise TransportError(
                f"--pipeline-balance pack: ranks {ranks} could not exchange {subject}: "
                f"{str(error).splitlines()[0]}"
            ) from error


def _placed(device: torch.device, storage: Any, location: str) -> Any:
    """Return a storage where the sender had it: on the host, or on the device of this rank."""
    return storage if location == "cpu" else storage.to(device=device)


def _packed(items: dict[int, Any]) -> bytes:
    if not items:
        return b""
    buffer = io.BytesIO()
    torch.save(items, buffer)
    buffer.seek(0)
    # The receiver loads weights only: what it would refuse is an error here, where its cause is.
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if refused:
        raise ScheduleError(
            f"--pipeline-balance pack: a micro-batch contains {refused[0]}, but replicas exchange "
            "tensors, numbers, text and their tuples, lists and dicts only; convert it where the "
            "data is read, or use --pipeline-balance order"
        )
    return buffer.getvalue()
