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
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product
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
        self.exchanges = [exchanges(schedule, rank) for rank in range(len(schedule.rows))]
        """By rank; here a pair counts as one action."""
        self._starts: list[list[float]] = []
        # By rank: when each action ends and its result leaves.
        self._left: list[list[_Moment]] = [[] for _ in schedule.rows]
        self._arrivals: list[list[tuple[_Moment, Transfer]]] = [[] for _ in schedule.rows]
        for rank, own in enumerate(self.exchanges):
            begins = schedule.begins(rank)
            self._starts.append([timeline.starts[rank][index] for index in begins])
            for index, exchange in zip(begins, own, strict=True):
                leaving = _sent(exchange)
                # What sends nothing sorts before all messages of its moment.
                first = leaving[0].message if leaving else Message("B", -1, -1)
                crosses = any(sent.to_twin for sent in leaving)
                moment = _Moment(timeline.ends[rank][index], first, crosses)
                self._left[rank].append(moment)
                for number, sent in enumerate(leaving):
                    transfer = Transfer("RECV", sent.message, rank, sent.to_twin)
                    self._arrivals[sent.peer].append((moment._replace(number=number), transfer))

    def posts(self, rank: int, *, leads: bool = True) -> list[Post]:
        """Return the receives of a rank in their order.

        Of two twins one `leads`: it sends before it receives.
        """
        starts = self._starts[rank]
        left = [each._replace(answers=each.answers and not leads) for each in self._left[rank]]
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
    found: dict[Place, list[Meeting]] = {}
    for twin, rank in product(range(schedule.placement.twins), range(len(schedule.rows))):
        place = twin, rank
        started = found[place] = []
        posts, coming = deque(order.posts(rank, leads=twin == 0)), set[Message]()
        for index, exchange in enumerate(order.exchanges[rank]):
            for taken in (False, True):
                while posts and (posts[0].before, posts[0].taken) <= (index, taken):
                    transfer = posts.popleft().transfer
                    coming.add(transfer.message)
                    source = 1 - twin if transfer.to_twin else twin, transfer.peer
                    started.append(Meeting(source, place, transfer.message))
                for needed in exchange.all_inputs:
                    if needed.verb == "RECV" and needed.message not in coming:
                        raise ScheduleError(
                            f"{exchange.action} of rank {rank} needs {needed.message}, but no "
                            "receive brings it; use --pipeline-transport auto"
                        )
            for sent in _sent(exchange):
                target = 1 - twin if sent.to_twin else twin, sent.peer
                started.append(Meeting(place, target, sent.message))
    return found


def check_queues(schedule: Schedule) -> None:
    """Check that a table ends even if each rank runs everything that it starts as one queue.

    Raises:
        ScheduleError: Ranks deadlock; the message says where.
    """
    check_meetings(schedule.label, programs(schedule))


def check_meetings(label: str, programs: Mapping[Place, Sequence[Meeting]]) -> None:
    """Check that all ranks finish if both ends of every message wait for each other.

    Raises:
        ScheduleError: Some ranks wait forever; the message says for what.
    """
    # Each rank works strictly in sequence and a send lasts until it is received, the worst that a
    # queue can do. Then ranks end if, and only if, their sequences agree with one order of all
    # messages, which both ends run. Collectives need no check: their members run the same row and
    # meet at the same position, so all replicas together block no more than one.
    ends = Counter(meeting for program in programs.values() for meeting in program)
    stuck = [meeting for meeting, count in ends.items() if count != 2]
    order: TopologicalSorter[Meeting] = TopologicalSorter()  # Python 3.10 has no [...] for it
    for program in programs.values():
        for before, after in pairwise(program):
            order.add(after, before)
    try:
        order.prepare()
    except CycleError as error:
        stuck += error.args[1][1:]
    if stuck:
        raise ScheduleError(
            f"{label} blocks where messages are matched by their order: "
            + "; ".join(map(str, stuck[:4]))
            + "; use --pipeline-transport auto"
        )
