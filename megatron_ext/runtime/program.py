"""A rank's table and its communication during a step: peers, message names and shapes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.search.greedy import forward_only, slots_for_forward
from megatron_ext.schedules.search.queues import MessageOrder, check_queues
from megatron_ext.schedules.table.communication import (
    Exchange,
    Transfer,
    exchanges,
    reduction_order,
)
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import most_alive, most_bypasses
from megatron_ext.schedules.table.validation import validate
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from megatron_ext.config.active import Choice, Pipeline
    from megatron_ext.message import Message
    from megatron_ext.runtime.data_order import ReadAhead
    from megatron_ext.schedules.table.actions import Action, Bypass, Schedule


@dataclass(frozen=True, eq=False)
class Table:
    """One rank's view of a validated schedule."""

    schedule: Schedule
    rank: int
    """This process's pipeline rank."""
    slots: int
    """Largest number of messages in flight on an edge. With this many slots, no send blocks."""

    window: int | None = None
    """For disaggregated tables only: how many micro-batches the forward passes may run ahead
    (`exchanges`)."""
    costs: Costs = UNIT
    """For training tables: the action durations that the table was generated for."""

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """This rank's actions with their transfers, in table order."""
        if self.window is None:
            return self.order.exchanges(self.rank)
        return exchanges(self.schedule, self.rank, self.window)

    @cached_property
    def begins(self) -> Sequence[int]:
        """Each exchange's position in the row; for a pair, the position of its first action."""
        return self.schedule.begins(self.rank)

    @cached_property
    def positions(self) -> Mapping[Action, int]:
        """Action on this rank -> its index in table order."""
        row = self.schedule.rows[self.rank]
        return {action: index for index, action in enumerate(row)}

    @cached_property
    def actions_by_stage(self) -> Counter[int]:
        """Stage -> number of its actions on this rank."""
        row = self.schedule.rows[self.rank]
        return Counter(action.stage for action in row)

    @cached_property
    def arrivals(self) -> tuple[Transfer, ...]:
        """The messages that this rank receives, in each source's sending order."""
        arrivals = []
        for rank in range(self.schedule.placement.num_ranks):
            for exchange in exchanges(self.schedule, rank, self.window):
                for sent in (*exchange.grants, *exchange.outputs):
                    if sent.verb != "SEND" or sent.peer != self.rank:
                        continue
                    arrival = Transfer(
                        "RECV",
                        sent.message,
                        rank,
                        sent.to_twin,
                    )
                    arrivals.append(arrival)
        return tuple(arrivals)

    @cached_property
    def order(self) -> MessageOrder:
        """The message order, which is the same on all ranks."""
        return MessageOrder(self.schedule)

    @cached_property
    def reduction_order(self) -> tuple[int, ...]:
        """This rank's stages, in the order in which the table completes them."""
        return reduction_order(self.schedule.rows[self.rank])

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, `Schedule.place`) of each backward pass that has a W; all others run whole."""
        split_backwards: set[tuple[int, int]] = set()
        for action in self.schedule.rows[self.rank]:
            if action.kind == "W":
                place = self.schedule.place(action)
                split_backwards.add((action.stage, place))
        return frozenset(split_backwards)

    @cached_property
    def max_live(self) -> int:
        """Peak number of forward passes with a pending backward pass; 1 without backward passes."""
        row = self.schedule.rows[self.rank]
        return int(most_alive(row, stash_ratio=0.0))


def make_table(
    pipeline: Pipeline,
    num_microbatches: int,
    rank: int,
    *,
    backward: bool,
    bypasses: tuple[Bypass, ...] = (),
) -> Table:
    """Return a pipeline rank's validated table for a number of micro-batches.

    If `backward` is false, the table has only forward passes, for evaluations. These run in
    micro-batch order, so there is nothing to validate.

    Raises:
        ScheduleError: The schedule cannot run this number of micro-batches.
    """
    if not backward:
        # Do not use the training table minus its backward passes: forward passes on
        # their own have a shorter order, which is the same for all schedules.
        schedule = forward_only(pipeline.placement, num_microbatches)
        schedule = replace(schedule, bypasses=bypasses)
        slots = slots_for_forward(schedule)
        # Only the number of micro-batches limits the bypasses in flight.
        slots += num_microbatches * most_bypasses(schedule)
        return Table(schedule, rank, slots)
    table = _training_table(
        pipeline,
        pipeline.schedule(num_microbatches),
        pipeline.costs,
        rank,
        bypasses,
    )
    # The pipeline has already checked this table without bypasses. Bypasses add messages, so check
    # the order again.
    if bypasses and pipeline.transport == "torch":
        check_queues(table.schedule, table.order)
    return table


def make_table_of_step(
    pipeline: Pipeline,
    read_ahead: ReadAhead,
    rank: int,
    *,
    bypasses: tuple[Bypass, ...] = (),
) -> Table:
    """Generate and validate the table for a step whose data has been read ahead.

    Raises:
        ScheduleError: No order was found.
    """
    schedule, costs = read_ahead.schedule(pipeline)
    table = _training_table(pipeline, schedule, costs, rank, bypasses)
    if pipeline.transport == "torch":
        check_queues(table.schedule, table.order)
    return table


def _training_table(
    pipeline: Pipeline,
    schedule: Schedule,
    costs: Costs,
    rank: int,
    bypasses: tuple[Bypass, ...],
) -> Table:
    """Return a pipeline rank's view of a validated training table, generated for these costs."""
    schedule = replace(schedule, bypasses=bypasses)
    # In a dynamic order, ranks choose their pairs at run time.
    if pipeline.dynamic is not None:
        schedule = replace(schedule, pairs=())
    slots_by_edge = validate(schedule).slots
    # Activations and bypasses in the same direction share slots.
    slots_by_direction: Counter[_Direction] = Counter()
    for (source, target, kind), num_slots in slots_by_edge.items():
        is_forward = kind in ("F", "P")
        direction = _Direction(source, target, is_forward)
        slots_by_direction[direction] += num_slots
    slots = max(slots_by_direction.values(), default=1)
    return Table(schedule, rank, slots, costs=costs)


class _Direction(NamedTuple):
    """One direction of the messages from a rank to another one."""

    source: int
    target: int
    is_forward: bool


def check_same_table(
    table: Table,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Check that all ranks in every group run the same table. Collective over each group.

    Raises:
        ScheduleError: Tables differ within a group. Every rank in that group raises this.
    """
    # Ranks with different tables would wait for messages that are never sent until they
    # time out. Compare 15 hexadecimal digits of the digest, because they fit in an
    # int64.
    start_of_digest = int(table.schedule.digest[:15], 16)
    for group in groups:
        different = _ranks_with_other_numbers(start_of_digest, group, device)
        if different:
            raise ScheduleError(
                f"the table for {table.schedule.label} on rank {dist.get_rank()} differs from the "
                f"tables on ranks {different}; use the same flags, version of megatron_ext and "
                "number of micro-batches on all ranks"
            )


def check_same_draws(
    seed: int,
    iteration: int,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Check that all ranks draw random numbers by micro-batch alike. Collective over each group.

    Args:
        seed: A number derived from the run's seed, of at most 63 bits.
        iteration: The number of the training step that is starting.
        groups: The groups whose ranks must have the same numbers.
        device: Where the groups exchange tensors.

    Raises:
        ScheduleError: Numbers differ within a group. Every rank in that group raises this.
    """
    # Otherwise, tensor-parallel ranks would drop out different parts of a tensor that
    # they all hold, and their copies of the same weight would drift apart.
    for group in groups:
        different = _ranks_with_other_numbers(seed, group, device)
        if different:
            raise ScheduleError(
                f"the seed on rank {dist.get_rank()} differs from the seeds on ranks {different}; "
                "pass the same seed on all ranks"
            )
        different = _ranks_with_other_numbers(iteration, group, device)
        if different:
            raise ScheduleError(
                f"begin_iteration({iteration}) on rank {dist.get_rank()} differs from the numbers "
                f"on ranks {different}; pass the same number on all ranks"
            )


def _ranks_with_other_numbers(
    number: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> str:
    """Return the ranks of a group whose numbers differ from this rank's. Collective."""
    own_number = torch.tensor([number], device=device)
    numbers = [torch.empty_like(own_number) for _ in range(group.size())]
    dist.all_gather(numbers, own_number, group=group)
    ranks = dist.get_process_group_ranks(group)
    different = []
    for rank, number_of_rank in zip(ranks, numbers, strict=True):
        if number_of_rank != own_number:
            different.append(str(rank))
    return ", ".join(different)


def check_same_choice(choice: Choice) -> None:
    """Check that `auto` chose the same setting on all ranks. Collective over all ranks.

    Raises:
        ScheduleError: The choices differ. Every rank raises this.
    """
    choices: list[Choice] = [choice] * dist.get_world_size()
    dist.all_gather_object(choices, choice)
    ranks_by_flags: dict[str, list[int]] = defaultdict(list)
    for rank, choice_of_rank in enumerate(choices):
        ranks_by_flags[choice_of_rank.flags].append(rank)
    if len(ranks_by_flags) == 1:
        return
    descriptions = []
    for flags, ranks in ranks_by_flags.items():
        first_rank = ranks[0]
        where = f"rank {first_rank}"
        if len(ranks) > 1:
            where += f" and {len(ranks) - 1} others"
        basis = choices[first_rank].basis
        descriptions.append(f"{flags} on {where}, {basis}")
    raise ScheduleError(
        f"auto has chosen different flags: {'; '.join(descriptions)}; instead of auto, set one "
        "of these, such as the one for the device with the least memory"
    )


Shapes = Mapping[str, Sequence[tuple[int, ...] | None]]
"""Message kind (F, B) -> the shape of each tensor, `[s, b, h]`; None if the shape is sent with the
tensor."""


def shape_between_stages(
    config: Any,
    groups: Any,
    length: int,
    micro_batch_size: int,
) -> tuple[int, int, int]:
    """Return the shape that stages exchange, `[s, b, h]`; n residual streams multiply h by n.

    s is the length on this rank, after dividing by context and sequence parallelism.
    """
    # Upstream's `get_tensor_shapes` does not support residual streams.
    divisor = groups.cp.size()
    if config.sequence_parallel:
        divisor *= groups.tp.size()
    num_streams = 1
    if getattr(config, "enable_mhc_connections", False):  # 0.20 and later
        num_streams = config.mhc_num_residual_streams
    width = num_streams * config.hidden_size
    return length // divisor, micro_batch_size, width


@dataclass(frozen=True)
class Peers:
    """Global ranks of the peers that this rank exchanges tensors with."""

    pipeline: Sequence[int]
    """Global ranks, by pipeline rank."""
    mirrored: Sequence[int] = ()
    """Global ranks in the mirrored pipeline, by pipeline rank; empty without twins."""

    def of(self, transfer: Transfer) -> int:
        """Return the global rank at the other end of a transfer."""
        ranks = self.mirrored if transfer.to_twin else self.pipeline
        return ranks[transfer.peer]

    def leads(self, rank: int) -> bool:
        """Return whether a pipeline rank sends to its twin before it receives from the twin.

        This is true on the twin with the lower global rank.
        """
        if not self.mirrored:
            return True
        return self.pipeline[rank] < self.mirrored[rank]


class Form(NamedTuple):
    """The shape and dtype of a tensor to receive."""

    shape: tuple[int, ...] | None
    """None if the shape is sent with the tensor."""
    dtype: torch.dtype
    part: int = 0
    """The tensor's index in its hand-over."""
    header: bool = False
    """Whether this tensor describes the tensors that follow."""

    def named(self, message: Message) -> Message:
        """Return the name of this tensor's message in a hand-over."""
        return message._replace(part=message.part + self.part, header=self.header)


class Ends(Protocol):
    """Resolves a table's transfers to peers and tensors."""

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return the global ranks at the other end of a transfer."""

    def forms(self, transfer: Transfer) -> Sequence[Form]:
        """Return the tensors that a transfer moves from or to each of these ranks, in order."""


@dataclass(frozen=True)
class PipelineEnds:
    """The `Ends` for a pipeline with one peer per transfer."""

    peers: Peers
    received: Mapping[str, Sequence[Form]]
    """Kind of message -> its tensors."""
    sent: Mapping[str, Sequence[Form]]
    """Kind of message -> its tensors."""

    @classmethod
    def of_shapes(
        cls,
        peers: Peers,
        shapes: Shapes,
        dtype: torch.dtype,
    ) -> PipelineEnds:
        """Return the ends for an ordinary pipeline, with the same dtype for all tensors."""
        received: dict[str, list[Form]] = {}
        for kind, shapes_of_kind in shapes.items():
            received[kind] = []
            for part, shape in enumerate(shapes_of_kind):
                form = Form(shape, dtype, part)
                received[kind].append(form)
        # The gradient that comes back (B) has one tensor per tensor in the activation
        # (F).
        sent = {
            "F": received["B"],
            "B": received["F"],
        }
        return cls(peers, received, sent)

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return the single global rank at the other end of a transfer."""
        return (self.peers.of(transfer),)

    def forms(self, transfer: Transfer) -> Sequence[Form]:
        """Return the tensors that a transfer moves, in order."""
        kind = transfer.message.kind
        if transfer.verb == "RECV":
            return self.received[kind]
        return self.sent[kind]


@dataclass(frozen=True)
class Program:
    """A rank's exchanges, with global ranks as peers and one tensor per transfer.

    If a transfer moves several tensors to several peers, the first tensor is sent to all peers
    before the second one is sent.
    """

    exchanges: tuple[Exchange, ...]
    expected: tuple[Expected, ...]
    """Messages to receive, in the order that all ranks share."""


def make_program(table: Table, ends: Ends, *, leads: bool = True) -> Program:
    """Resolve the source or destination of every tensor in a step.

    `leads` is true on the twin that sends before it receives and false on the other one.
    """
    # Look up everything in advance, because the device waits for the host between two actions.
    # Peers and names depend only on the table and the shapes, so all steps share one program.
    resolved = tuple(_resolved(exchange, ends) for exchange in table.exchanges)
    expected: list[Expected] = []
    for transfer, calls_before in _turns(table, resolved, leads=leads):
        for form in ends.forms(transfer):
            message = form.named(transfer.message)
            for rank in ends.ranks(transfer):
                arrival = Expected(
                    rank,
                    message,
                    form.shape,
                    form.dtype,
                    calls_before,
                )
                expected.append(arrival)
    return Program(resolved, tuple(expected))


class _Turn(NamedTuple):
    """When to post a receive."""

    transfer: Transfer
    calls_before: int
    """Number of calls to the transport before the receive is posted."""


def _turns(table: Table, resolved: Iterable[Exchange], *, leads: bool) -> list[_Turn]:
    """Return the receives of a step, in the order that all ranks share."""
    # In a disaggregated job, the transport matches messages by name, so their order is irrelevant.
    if table.schedule.disaggregated:
        return [_Turn(transfer, 0) for transfer in table.arrivals]
    # Tensors that stay on this rank (LOCAL) never reach the transport.
    # [exchange] -> number of calls to `recv`; number of all calls before the exchange
    received: list[int] = []
    calls = [0]
    for exchange in resolved:
        num_received = sum(t.verb == "RECV" for t in exchange.all_inputs)
        num_sent = sum(t.verb == "SEND" for t in exchange.all_outputs)
        received.append(num_received)
        calls.append(calls[-1] + num_received + num_sent)
    turns: list[_Turn] = []
    for post in table.order.posts(table.rank, leads=leads):
        calls_before = calls[post.before]
        if post.is_behind_inputs:
            calls_before += received[post.before]
        turns.append(_Turn(post.transfer, calls_before))
    return turns


def _resolved(exchange: Exchange, ends: Ends) -> Exchange:
    """Return an exchange whose transfers are single tensors from or to global ranks."""

    def resolve(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
        for transfer in transfers:
            for form in ends.forms(transfer):
                name = form.named(transfer.message)
                if transfer.verb == "LOCAL":
                    yield transfer._replace(message=name)
                    continue
                for rank in ends.ranks(transfer):
                    yield transfer._replace(
                        message=name,
                        peer=rank,
                        to_twin=False,
                    )

    partner = exchange.partner
    if partner is not None:
        partner = _resolved(partner, ends)
    return exchange._replace(
        awaits=tuple(resolve(exchange.awaits)),
        inputs=tuple(resolve(exchange.inputs)),
        grants=tuple(resolve(exchange.grants)),
        outputs=tuple(resolve(exchange.outputs)),
        partner=partner,
    )
