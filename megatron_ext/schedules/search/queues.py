"""A total order of all messages of a step, and the proof that ranks which follow it never block.

NCCL and MCCL match messages by order, not by name: the n-th send of a communicator meets its n-th
receive. And a device may run everything that its rank has started as one queue, in which an early
receive blocks the very computation that its sender waits for (CUDA_DEVICE_MAX_CONNECTIONS=1 forces
this, and with many streams it can happen anyway).

So all messages of a table get one order, by the time at which a simulated step sends them. A rank
starts its receives between its sends in that order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.communication import Transfer, exchanges

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.communication import Exchange


class Post(NamedTuple):
    """The position in a row at which the rank starts a receive."""

    transfer: Transfer
    before: int
    """Position of the action that it precedes."""
    taken: bool
    """Whether the rank receives the inputs of that action first."""


class _Moment(NamedTuple):
    """The position of a message in the total order."""

    time: float
    message: Message
    """The first that its action sends: what routes take leaves right behind it."""
    answers: bool
    """Where its action sends to the twin, which does the same at the same time: the leader's are
    first."""
    number: int = 0
    """Among those of its action."""


class MessageOrder:
    """The order of the messages of a validated table, from the point of view of each rank."""

    def __init__(self, schedule: Schedule) -> None:
        # Unit costs: a user's may differ so widely that times coincide.
        timeline = simulate(schedule)
        begins = [schedule.begins(rank) for rank in range(len(schedule.rows))]
        self._starts = [[timeline.starts[r][i] for i in each] for r, each in enumerate(begins)]
        self._ends = [[timeline.ends[r][i] for i in each] for r, each in enumerate(begins)]
        self.exchanges: list[tuple[Exchange, ...]] = []
        """By rank; here a pair counts as one action."""
        self._arrivals: list[list[tuple[_Moment, Transfer]]] = [[] for _ in schedule.rows]
        for rank, ends in enumerate(self._ends):
            self.exchanges.append(exchanges(schedule, rank))
            for end, exchange in zip(ends, self.exchanges[rank], strict=True):
                leaving = _sent(exchange)
                crosses = any(sent.to_twin for sent in leaving)
                for number, sent in enumerate(leaving):
                    moment = _Moment(end, leaving[0].message, crosses, number)
                    transfer = Transfer("RECV", sent.message, rank, sent.to_twin)
                    self._arrivals[sent.peer].append((moment, transfer))

    def posts(self, rank: int, *, leads: bool = True) -> list[Post]:
        """Return the receives of a rank in their order.

        Args:
            rank: Pipeline rank.
            leads: Whether this one of two twins sends before it receives.
        """
        starts = self._starts[rank]
        left = [
            self._left(exchange, end, leads=leads)
            for exchange, end in zip(self.exchanges[rank], self._ends[rank], strict=True)
        ]
        arrivals = sorted(
            (moment._replace(answers=moment.answers and leads == transfer.to_twin), transfer)
            for moment, transfer in self._arrivals[rank]
        )
        posts = []
        for moment, transfer in arrivals:
            # Behind what leaves earlier in the order of all messages, and before what leaves later:
            # that is what keeps two ranks from waiting for each other.
            index = bisect_left(left, moment)
            taken = index < len(starts) and starts[index] < moment.time
            posts.append(Post(transfer, index, taken))
        return posts

    @staticmethod
    def _left(exchange: Exchange, end: float, *, leads: bool) -> _Moment:
        """Return the moment when an action ends and its result leaves."""
        leaving = _sent(exchange)
        if not leaving:
            # What sends nothing sorts before all messages of its moment.
            return _Moment(end, Message("B", -1, -1), False)
        crosses = any(sent.to_twin for sent in leaving)
        return _Moment(end, leaving[0].message, crosses and not leads)


def _sent(exchange: Exchange) -> list[Transfer]:
    return [transfer for transfer in exchange.all_outputs if transfer.verb == "SEND"]


Place = tuple[int, int]
"""(twin, pipeline rank)."""


class Meeting(NamedTuple):
    """A message as both of its ends know it."""

    source: Place
    target: Place
    message: Message

    def __str__(self) -> str:
        kind, stage, microbatch = self.message[:3]
        source, target = self.source[1], self.target[1]
        return f"rank {source} sends what {stage}{kind}{microbatch} on rank {target} needs"


def programs(schedule: Schedule) -> dict[Place, list[Meeting]]:
    """Return the messages of each rank of both twins, in the order in which it starts them.

    Raises:
        ScheduleError: An action needs a message before the rank starts its receive.
    """
    order = MessageOrder(schedule)
    return {
        (twin, rank): _program(order, (twin, rank))
        for twin in range(schedule.placement.twins)
        for rank in range(len(schedule.rows))
    }


def _program(order: MessageOrder, place: Place) -> list[Meeting]:
    twin, rank = place
    # The next one last, where `pop` takes it.
    posts = order.posts(rank, leads=twin == 0)[::-1]
    started: list[Meeting] = []
    coming: set[Message] = set()

    def start(index: int, *, taken: bool) -> None:
        while posts and (posts[-1].before, posts[-1].taken) <= (index, taken):
            transfer = posts.pop().transfer
            coming.add(transfer.message)
            started.append(_meeting(transfer, place))

    for index, exchange in enumerate(order.exchanges[rank]):
        start(index, taken=False)
        for needed in exchange.all_inputs:
            if needed.verb == "RECV" and needed.message not in coming:
                raise ScheduleError(
                    f"{exchange.action} of rank {rank} needs {needed.message}, but no receive "
                    "brings it; use --pipeline-transport auto"
                )
        start(index, taken=True)
        started += [_meeting(sent, place) for sent in _sent(exchange)]
    return started


def _meeting(transfer: Transfer, place: Place) -> Meeting:
    twin, _ = place
    other = (1 - twin if transfer.to_twin else twin, transfer.peer)
    ends = (place, other) if transfer.verb == "SEND" else (other, place)
    return Meeting(*ends, transfer.message)


def check_queues(schedule: Schedule) -> None:
    """Check that a table ends even if each rank runs everything that it starts as one queue.

    Raises:
        ScheduleError: Ranks deadlock; the message says where.
    """
    check_meetings(schedule.label, programs(schedule))


def check_meetings(label: str, programs: Mapping[Place, Sequence[Meeting]]) -> None:
    """Check that all ranks finish if both ends of every message wait for each other.

    Args:
        label: Name of the table, for the error.
        programs: By rank: its messages in its order.

    Raises:
        ScheduleError: Some ranks wait forever; the message says for what.
    """
    # Each rank works strictly in sequence and a send lasts until it is received, the worst that a
    # queue can do. Ranks in one order still end: both ends of the first remaining message are free.
    # Collectives need no check: their members run the same row and meet at the same position, so
    # all replicas together block no more than one.
    done = dict.fromkeys(programs, 0)
    todo = list(programs)
    while todo:
        place = todo.pop()
        while (meeting := _next(programs, done, place)) is not None:
            other = meeting.target if meeting.source == place else meeting.source
            # The other end is not there yet; it will come back to this rank when it is.
            if _next(programs, done, other) != meeting:
                break
            done[place] += 1
            done[other] += 1
            todo.append(other)
    stuck = [meeting for place in programs if (meeting := _next(programs, done, place))]
    if stuck:
        raise ScheduleError(
            f"{label} blocks where messages are matched by their order: "
            + "; ".join(map(str, stuck[:4]))
            + "; use --pipeline-transport auto"
        )


def _next(
    programs: Mapping[Place, Sequence[Meeting]], done: Mapping[Place, int], place: Place
) -> Meeting | None:
    program, index = programs[place], done[place]
    return program[index] if index < len(program) else None
