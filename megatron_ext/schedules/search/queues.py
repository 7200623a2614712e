"""Orders all messages in a step and proves that ranks that follow this order never deadlock.

NCCL and MCCL match messages by order, not by name: the n-th send on a communicator matches the n-th
receive. In addition, a device may run everything that its rank has started in a single queue, in
which case an early receive blocks the very computation that its sender is waiting for.
CUDA_DEVICE_MAX_CONNECTIONS=1 forces a single queue, and many streams can have the same effect.

Therefore, all messages in a table are ordered by their send times in a simulated step, and every
rank places its receives between its sends according to that order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.communication import Transfer, exchanges

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.communication import Exchange


class Post(NamedTuple):
    """Where in its row a rank starts a receive."""

    transfer: Transfer
    before: int
    """Position of the action that the receive precedes."""
    is_behind_inputs: bool
    """Whether the receive starts only after that action's inputs have been received."""

    @property
    def turn(self) -> tuple[int, bool]:
        """A sort key: receives start in ascending order of it."""
        return self.before, self.is_behind_inputs


class _Moment(NamedTuple):
    """A message's position in the total order."""

    time: float
    message: Message
    """The first message that the action sends. Bypasses follow immediately."""
    answers: bool
    """Whether this message comes second when twins send to each other at the same time. The leading
    twin's message comes first."""
    number: int = 0
    """Index among the messages that the same action sends."""


class _Departure(NamedTuple):
    """An action's sends and their position in the total order."""

    moment: _Moment
    sends: list[Transfer]


class _Arrival(NamedTuple):
    """A receive and its message's position in the total order."""

    moment: _Moment
    transfer: Transfer


class MessageOrder:
    """The order of all messages in a validated table, as seen by each rank.

    A rank needs only its own actions and those on the ranks that send to it, so everything is
    derived on first use.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        # By rank.
        self._exchanges: dict[int, tuple[Exchange, ...]] = {}
        self._departures: dict[int, list[_Departure]] = {}

    @cached_property
    def _timeline(self) -> Timeline:
        # Use unit costs, because a user's costs may differ by so much that rounding
        # makes times coincide.
        return simulate(_with_equal_slices(self._schedule))

    @cached_property
    def _senders(self) -> list[set[int]]:
        """By rank: the ranks that send to it."""
        senders: list[set[int]] = [set() for _ in self._schedule.rows]
        for outputs_by_stage in self._schedule.links.values():
            for output in chain.from_iterable(outputs_by_stage):
                if output.link is not None:
                    source, target = output.link
                    senders[target].add(source)
        rank_of = self._schedule.placement.rank_of
        for bypass in self._schedule.bypasses:
            source = rank_of[bypass.stage]
            target = rank_of[bypass.taker]
            senders[target].add(source)
        return senders

    def exchanges(self, rank: int) -> tuple[Exchange, ...]:
        """Return a rank's exchanges. A pair counts as one action."""
        if rank not in self._exchanges:
            self._exchanges[rank] = exchanges(self._schedule, rank)
        return self._exchanges[rank]

    def _departures_of(self, rank: int) -> list[_Departure]:
        """Return when every action on a rank ends, which is when its results are sent."""
        if rank in self._departures:
            return self._departures[rank]
        departures = []
        ends = self._timeline.ends[rank]
        begins = self._schedule.begins(rank)
        rank_exchanges = self.exchanges(rank)
        for index, exchange in zip(begins, rank_exchanges, strict=True):
            sends = _sends(exchange)
            # An action that sends nothing sorts before all messages that are sent at
            # the same time.
            first = Message("B", -1, -1)
            if sends:
                first = sends[0].message
            crosses = any(send.to_twin for send in sends)
            moment = _Moment(ends[index], first, crosses)
            departures.append(_Departure(moment, sends))
        self._departures[rank] = departures
        return departures

    def posts(self, rank: int, *, leads: bool = True) -> list[Post]:
        """Return a rank's receives, in order.

        `leads` marks the twin that sends before it receives.
        """
        starts_in_row = self._timeline.starts[rank]
        begins = self._schedule.begins(rank)
        starts = [starts_in_row[index] for index in begins]
        departures = []
        for moment, _ in self._departures_of(rank):
            answers = moment.answers and not leads
            departures.append(moment._replace(answers=answers))
        posts = []
        arrivals = self._arrivals(rank, leads=leads)
        for moment, transfer in sorted(arrivals):
            # Place the receive between the sends before and after it in the total
            # order, so that no two ranks wait for each other.
            index = bisect_left(departures, moment)
            # If a message is sent after that action has begun, receive it after the
            # action's inputs. In a single queue, an earlier receive would hold up the
            # action.
            is_behind_inputs = False
            if index < len(starts):
                is_behind_inputs = starts[index] < moment.time
            posts.append(Post(transfer, index, is_behind_inputs))
        return posts

    def _arrivals(self, rank: int, *, leads: bool) -> list[_Arrival]:
        """Return everything that a rank receives, sender by sender."""
        arrivals = []
        for source in sorted(self._senders[rank]):
            for moment, sends in self._departures_of(source):
                for number, send in enumerate(sends):
                    if send.peer != rank:
                        continue
                    answers = moment.answers and leads == send.to_twin
                    arrivals.append(
                        _Arrival(
                            moment._replace(answers=answers, number=number),
                            Transfer("RECV", send.message, source, send.to_twin),
                        )
                    )
        return arrivals


def _with_equal_slices(schedule: Schedule) -> Schedule:
    """Return the table with slices that all take time, even those of empty micro-batches."""
    if not schedule.slice_sizes:
        return schedule
    slice_sizes = tuple((1.0,) * len(sizes) for sizes in schedule.slice_sizes)
    return replace(schedule, slice_sizes=slice_sizes)


def _sends(exchange: Exchange) -> list[Transfer]:
    sends = []
    for transfer in exchange.all_outputs:
        if transfer.verb == "SEND":
            sends.append(transfer)
    return sends


Place = tuple[int, int]
"""(twin, pipeline rank)."""


class Meeting(NamedTuple):
    """A message that has the same name on its sender and its receiver."""

    source: Place
    target: Place
    message: Message

    def __str__(self) -> str:
        kind, stage, microbatch = self.message[:3]
        source = self.source[1]
        target = self.target[1]
        return (
            f"rank {source} sends what {stage}{kind}{microbatch} on rank {target} needs"
        )


def programs(
    schedule: Schedule,
    order: MessageOrder | None = None,
) -> dict[Place, list[Meeting]]:
    """Return every rank's messages, for both twins, in the order in which the rank starts them.

    `order` is the table's message order. If None, it is computed.

    Raises:
        ScheduleError: An action needs a message before the rank starts to receive it.
    """
    order = order or MessageOrder(schedule)
    twins = range(schedule.placement.twins)
    ranks = range(len(schedule.rows))
    started: dict[Place, list[Meeting]] = {}
    for twin, rank in product(twins, ranks):
        started[twin, rank] = _program(order, twin, rank)
    return started


def _program(
    order: MessageOrder,
    twin: int,
    rank: int,
) -> list[Meeting]:
    """Return a rank's messages in the order in which the rank starts them.

    Raises:
        ScheduleError: An action needs a message before the rank starts to receive it.
    """
    place = twin, rank
    started: list[Meeting] = []
    is_leading_twin = twin == 0
    posts = deque(order.posts(rank, leads=is_leading_twin))
    posted: set[Message] = set()
    for index, exchange in enumerate(order.exchanges(rank)):
        for behind_inputs in (False, True):
            # First start the receives that precede the action, then those that wait for
            # its inputs.
            while posts and posts[0].turn <= (index, behind_inputs):
                transfer = posts.popleft().transfer
                posted.add(transfer.message)
                source = _other_end(twin, transfer)
                started.append(Meeting(source, place, transfer.message))
            for needed in exchange.all_inputs:
                is_received = needed.verb == "RECV"
                if is_received and needed.message not in posted:
                    raise ScheduleError(
                        f"{exchange.action} on rank {rank} needs {needed.message} before its "
                        "receive starts; use --pipeline-transport auto"
                    )
        for send in _sends(exchange):
            target = _other_end(twin, send)
            started.append(Meeting(place, target, send.message))
    return started


def _other_end(twin: int, transfer: Transfer) -> Place:
    """Return a transfer's peer."""
    if transfer.to_twin:
        return 1 - twin, transfer.peer
    return twin, transfer.peer


def check_queues(
    schedule: Schedule,
    order: MessageOrder | None = None,
) -> None:
    """Check that a table completes even if every rank runs everything in a single queue.

    `order` is the table's message order. If None, it is computed.

    Raises:
        ScheduleError: The ranks deadlock; the message says where.
    """
    check_meetings(schedule.label, programs(schedule, order))


def check_meetings(
    label: str,
    programs: Mapping[Place, Sequence[Meeting]],
) -> None:
    """Check that all ranks finish even if every sender waits for its receiver.

    Raises:
        ScheduleError: Some ranks wait forever; the message says for which messages.
    """
    # Assume the worst case: every rank works strictly in sequence, and a send blocks
    # until it is received. Then the ranks finish if and only if there is an order of
    # all messages that is consistent with every rank's sequence. Collectives need no
    # check: their members run the same row and reach the collective at the same
    # position, so multiple replicas deadlock only if a single replica does.
    ends: Counter[Meeting] = Counter()
    for program in programs.values():
        ends.update(program)
    # A message without a sender or a receiver waits forever.
    stuck = []
    for meeting, num_ends in ends.items():
        if num_ends != 2:
            stuck.append(meeting)
    # Annotate the variable, because `TopologicalSorter[Meeting]()` fails on Python 3.10.
    order: TopologicalSorter[Meeting] = TopologicalSorter()
    for program in programs.values():
        for before, after in pairwise(program):
            order.add(after, before)
    try:
        order.prepare()
    except CycleError as error:
        # `graphlib` repeats a cycle's first message at the end.
        cycle = error.args[1]
        stuck += cycle[1:]
    if stuck:
        examples = "; ".join(map(str, stuck[:4]))
        raise ScheduleError(
            f"{label} deadlocks where messages are matched by their order: {examples}; use "
            "--pipeline-transport auto"
        )
