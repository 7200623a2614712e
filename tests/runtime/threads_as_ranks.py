"""Runs ranks as threads, with wires in memory and a computation without a model.

An action's result is a number that identifies its inputs. So the numbers of all ranks show whether
each action got the inputs that the model's chain of stages prescribes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.feature_list import TABLES
from megatron_ext.runtime.program import Peers
from megatron_ext.schedules import Action, Schedule, generate, registered
from megatron_ext.schedules.table.actions import Row
from megatron_ext.schedules.table.table_change import in_use

from . import fake

if TYPE_CHECKING:
    import torch

    from megatron_ext.message import Message
    from megatron_ext.runtime.executor import Executor

_LONG_S = 60.0

Make = Callable[[float], fake.Compute]


class Network:
    """The wires of all ranks, which are threads; detects when all of them wait."""

    def __init__(self, num_ranks: int) -> None:
        self.changed = threading.Condition()
        self.running = set(range(num_ranks))
        self.blocked: dict[int, tuple[int, Message]] = {}
        """By rank: the message that it waits for, and its sender."""
        self.wires = [SharedWire(rank, self) for rank in range(num_ranks)]
        for wire in self.wires:
            wire.peers = list(self.wires)

    @property
    def is_stuck(self) -> bool:
        """Whether every running rank waits for a message that does not exist."""
        return all(
            rank in self.blocked and self.blocked[rank] not in self.wires[rank].mail
            for rank in self.running
        )

    def run(self, rank: int, executor: Executor) -> None:
        """Run one rank."""
        try:
            executor.run()
        finally:
            with self.changed:
                self.running.remove(rank)
                self.changed.notify_all()


class SharedWire(fake.Wire):
    """The wire of a rank: a receive sleeps until the message arrives, or no rank can send it."""

    def __init__(self, rank: int, network: Network) -> None:
        super().__init__(rank, absent=False)
        self.network = network

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        with self.network.changed:
            super().isend(tensor, target, message)
            self.network.changed.notify_all()

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        network = self.network
        with network.changed:
            network.blocked[self.rank] = source, message
            if network.is_stuck:
                network.changed.notify_all()
            network.changed.wait_for(
                lambda: (source, message) in self.mail or network.is_stuck,
                timeout=_LONG_S,
            )
            del network.blocked[self.rank]
            return super().recv(source, message, timeout_s)


def run_all(
    schedule: Schedule, num_parts: int = 1, make: Make | None = None
) -> list[fake.Compute]:
    """Run every rank of a table, for both twins; return each rank's computation.

    Args:
        schedule: The table.
        num_parts: Number of tensors per hand-over.
        make: Creates a rank's computation from its twin's data; tensors may have any length.
    """
    num_ranks, twins = len(schedule.rows), schedule.placement.twins
    network = Network(num_ranks * twins)
    computes = [
        fake.Compute(num_parts=num_parts, start=start_of(number // num_ranks))
        if make is None
        else make(start_of(number // num_ranks))
        for number in range(num_ranks * twins)
    ]

    def run(number: int) -> None:
        twin, rank = divmod(number, num_ranks)
        pipeline = range(twin * num_ranks, (twin + 1) * num_ranks)
        other = (1 - twin) * num_ranks
        mirrored = range(other, other + num_ranks) if twins == 2 else ()
        peers, table = Peers(pipeline, mirrored), fake.table_of(schedule, rank)
        wire = network.wires[number]
        network.run(
            number,
            fake.executor(
                table, computes[number], wire, peers=peers, num_parts=num_parts
            ),
        )

    with ThreadPoolExecutor(len(computes)) as pool:
        futures = [pool.submit(run, number) for number in range(len(computes))]
    for future in futures:
        future.result()
    assert not any(wire.mail or wire.expected for wire in network.wires), (
        "all was taken"
    )
    return computes


def start_of(twin: int) -> float:
    """Return the data of a twin, which identifies its micro-batches."""
    return 64.0 * twin


def chain(schedule: Schedule, start: float = 0.0) -> dict[Action, list[float]]:
    """Return the correct inputs of each action under any schedule, computed stage by stage."""
    inputs: dict[Action, list[float]] = {}
    stages = range(schedule.num_stages)
    for microbatch in range(schedule.num_microbatches):
        values: list[float] = []
        for stage in stages:
            action = Action(stage, "F", microbatch)
            inputs[action] = values
            values = [fake.result(action, values[0] if values else start)]
        values = []
        for stage in reversed(stages):
            action = Action(stage, "B", microbatch)
            inputs[action] = values
            saved = inputs[action._replace(kind="F")]
            values = [fake.result(action, [*values, *saved][0])]
    return inputs


@st.composite
def sized(draw: st.DrawFn) -> Schedule:
    """A schedule of 2 to 6 ranks of any generator, with or without pairs."""
    name = draw(st.sampled_from(list(registered())))
    pairs = draw(st.booleans()) and "pairs" in TABLES
    pp, count = draw(st.integers(2, 6)), draw(st.integers(1, 10))
    for ranks in (pp, pp + 1, 4):
        for number in range(count, count + 2 * ranks + 2):
            try:
                chunks = 2 if registered()[name].free_chunks else None
                return generate(name, ranks, number, chunks, **in_use(pairs=pairs))
            except ScheduleError:  # noqa: PERF203 - bad sizes raise
                continue
    raise AssertionError(f"{name} takes no size near pp {pp}, m {count}")


Rank = tuple[Row, fake.Compute, Callable[[Action], list[float]]]
"""A rank's row, its results, and a function that returns the correct inputs of an action."""


def by_rank(
    schedule: Schedule, num_parts: int = 1, make: Make | None = None
) -> Iterator[Rank]:
    """Run a schedule; yield each rank's row, results and correct inputs."""
    chains = [
        chain(schedule, start_of(twin)) for twin in range(schedule.placement.twins)
    ]
    num_ranks = len(schedule.rows)
    for number, compute in enumerate(run_all(schedule, num_parts, make)):
        twin, rank = divmod(number, num_ranks)

        def expected(action: Action, twin: int = twin) -> list[float]:
            # Twins run some stages for each other.
            origin = 1 - twin if schedule.placement.is_crossed(action.stage) else twin
            return chains[origin][whole(action)]

        yield schedule.rows[rank], compute, expected


def whole(action: Action) -> Action:
    """Return the corresponding action without split backwards."""
    return action if action.kind == "F" else action._replace(kind="B")
