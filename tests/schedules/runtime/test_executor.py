"""The real executor, with a computation that has no model and ranks that are threads.

Each rank runs its row on a wire in memory; what an action makes is a number that tells from which
inputs it was made. So the numbers of all ranks together say whether each action got what the
model's chain of stages has for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import MegatronExtError, ScheduleError, TransportTimeout
from megatron_ext.messages import Message
from megatron_ext.schedules import Action, Schedule, generate, registered
from megatron_ext.schedules.runtime.measured import Measured, StepMeasure
from megatron_ext.schedules.runtime.observer import Executed, Observer
from megatron_ext.transport.base import Expected
from megatron_ext.transport.observed import ObservedTransport, TransportObserver

from . import fake

if TYPE_CHECKING:
    from megatron_ext.schedules.runtime.executor import Executor
    from megatron_ext.schedules.runtime.rank_table import Table
from megatron_ext.schedules.representation.actions import Row
from megatron_ext.schedules.runtime.program import Peers

_LONG_S = 60.0


class Network:
    """The wires of all ranks, which are threads; notices when all of them wait."""

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
        """Whether every rank that still runs waits for what is not there."""
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
    """The wire of a rank: a receive sleeps until the message is there, or nobody can send it."""

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
                lambda: (source, message) in self.mail or network.is_stuck, timeout=_LONG_S
            )
            del network.blocked[self.rank]
            return super().recv(source, message, timeout_s)


def run_all(schedule: Schedule, num_parts: int = 1) -> list[fake.Compute]:
    """Run every rank of a table, of both twins; return what each computed.

    Args:
        schedule: The table.
        num_parts: Tensors of one hand-over.
    """
    num_ranks, twins = len(schedule.rows), schedule.placement.twins
    network = Network(num_ranks * twins)
    computes = [
        fake.Compute(num_parts=num_parts, start=start_of(number // num_ranks))
        for number in range(num_ranks * twins)
    ]

    def run(number: int) -> None:
        twin, rank = divmod(number, num_ranks)
        pipeline = range(twin * num_ranks, (twin + 1) * num_ranks)
        other = (1 - twin) * num_ranks + rank if twins == 2 else None
        peers, table = Peers(pipeline, other), fake.table_of(schedule, rank)
        wire = network.wires[number]
        network.run(
            number,
            fake.executor(table, computes[number], wire, peers=peers, num_parts=num_parts),
        )

    with ThreadPoolExecutor(len(computes)) as pool:
        futures = [pool.submit(run, number) for number in range(len(computes))]
    for future in futures:
        future.result()
    assert not any(wire.mail or wire.expected for wire in network.wires), "all was taken"
    return computes


def start_of(twin: int) -> float:
    """Return the data of a twin, by which its micro-batches can be told apart."""
    return 64.0 * twin


def chain(schedule: Schedule, start: float = 0.0) -> dict[Action, list[float]]:
    """Return the inputs that each action of a model has, whatever the schedule: stage by stage."""
    inputs: dict[Action, list[float]] = {}
    stages = range(schedule.num_stages)
    for microbatch in range(schedule.num_microbatches):
        given: list[float] = []
        for stage in stages:
            action = Action(stage, "F", microbatch)
            inputs[action] = given
            given = [fake.result(action, given[0] if given else start)]
        given = []
        for stage in reversed(stages):
            action = Action(stage, "B", microbatch)
            inputs[action] = given
            saved = inputs[action._replace(kind="F")]
            given = [fake.result(action, [*given, *saved][0])]
    return inputs


@st.composite
def sized(draw: st.DrawFn) -> Schedule:
    """A schedule of 2 to 6 ranks of any generator."""
    name = draw(st.sampled_from(list(registered())))
    pp, count = draw(st.integers(2, 6)), draw(st.integers(1, 10))
    for ranks in (pp, pp + 1, 4):
        for number in range(count, count + 2 * ranks + 2):
            try:
                return generate(name, ranks, number, 2 if registered()[name].free_chunks else None)
            except ScheduleError:  # noqa: PERF203 - sizes are refused by an exception
                continue
    raise AssertionError(f"{name} takes no size near pp {pp}, m {count}")


Rank = tuple[Row, fake.Compute, Callable[[Action], list[float]]]
"""Its row, what it computed, and the inputs that a model has for an action of it."""


def by_rank(schedule: Schedule, num_parts: int = 1) -> Iterator[Rank]:
    """Run a schedule; yield what is known of each rank."""
    chains = [chain(schedule, start_of(twin)) for twin in range(schedule.placement.twins)]
    num_ranks = len(schedule.rows)
    for number, compute in enumerate(run_all(schedule, num_parts)):
        twin, rank = divmod(number, num_ranks)

        def expected(action: Action, twin: int = twin) -> list[float]:
            # Twins run some stages for each other.
            origin = 1 - twin if schedule.placement.is_crossed(action.stage) else twin
            return chains[origin][whole(action)]

        yield schedule.rows[rank], compute, expected


@settings(max_examples=40, deadline=None)
@given(sized(), st.integers(1, 2))
def test_every_action_gets_the_inputs_of_the_model(schedule: Schedule, num_parts: int) -> None:
    for row, compute, expected in by_rank(schedule, num_parts):
        assert compute.log == list(compute_log(compute.log, row)), "the order of the table"
        for action, values in compute.inputs.items():
            if action.kind != "W":
                wanted = expected(action)
                assert values == [value + part for value in wanted for part in range(num_parts)]


def whole(action: Action) -> Action:
    """Return an action as a model without split backwards has it."""
    return action if action.kind == "F" else action._replace(kind="B")


def compute_log(log: Sequence[str], row: Sequence[Action]) -> Iterator[str]:
    """Yield a log with its actions in the order of a row."""
    actions = iter(row)
    for entry in log:
        yield entry if entry == "release" or entry.startswith("free") else str(next(actions))


@settings(max_examples=25, deadline=None)
@given(sized())
def test_gradients_are_summed_in_the_order_of_the_table(schedule: Schedule) -> None:
    for row, compute, expected in by_rank(schedule):
        for stage, summed in compute.gradients.items():
            ends = [a for a in row if a.stage == stage and a.kind in "BW"]
            assert [microbatch for microbatch, _ in summed] == [a.microbatch for a in ends]
            for microbatch, value in summed:
                inputs = [Action(stage, kind, microbatch) for kind in ("B", "F")]
                assert value == sum(number for action in inputs for number in expected(action))


@settings(max_examples=25, deadline=None)
@given(sized())
def test_gathers_precede_and_reductions_follow_all_of_a_stage(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        log: list[str] = []
        compute, sync = fake.Compute(log), fake.Sync(log)
        table = fake.table_of(schedule, rank)
        fake.executor(table, compute, fake.Wire(rank), sync, sync).run()
        for stage in schedule.placement.stages_of[rank]:
            places = [log.index(str(action)) for action in row if action.stage == stage]
            assert log.index(f"gather {stage}") < min(places)
            assert log.index(f"reduce {stage}") > max(places)
            assert [log.count(f"{what} {stage}") for what in ("gather", "reduce")] == [1, 1]
            final = [a for a in row if a.stage == stage][-1]
            assert f"last {final}" in log
            assert (f"progress {stage}" in log) == (final.kind == "W")
        stages = {action.stage: action for action in reversed(row)}
        assert sorted(compute.first) == sorted(stages.values())


def lone(name: str, rank: int, *sizes: int) -> tuple[Table, list[str]]:
    """Run one rank of a schedule alone; return its table and what it did."""
    log: list[str] = []
    table = fake.table_of(generate(name, *sizes), rank)
    fake.executor(table, fake.Compute(log), fake.Wire(rank, log), fake.Sync(log)).run()
    return table, log


def test_results_leave_before_bookkeeping() -> None:
    """A backward's graph is freed after its gradient was sent, reductions start after that."""
    _, log = lone("1f1b", 1, 2, 1)
    assert log == [
        "begin", "receive F1.0.0 from 0", "1F0", "last 1B0", "1B0", "send B0.0.0 to 0",
        "free 1.0", "reduce 1", "flush",
    ]  # fmt: skip


def test_outputs_are_released_once_they_have_left() -> None:
    _, log = lone("1f1b", 0, 2, 1)
    assert log[:4] == ["begin", "0F0", "send F1.0.0 to 1", "release"]


def test_a_tensor_stays_on_its_rank_between_two_of_its_stages() -> None:
    """The inner turn of a V: no message, and an activation that is a leaf of its own."""
    _, log = lone("zb-v", 1, 2, 1)
    turn = log.index("1F0")
    assert log[turn : turn + 3] == ["1F0", "release", "2F0"]
    assert not any("F2.0" in entry or "B1.0" in entry for entry in log)


def test_a_handed_activation_survives_the_release_of_its_maker() -> None:
    schedule = generate("zb-v", 2, 1)
    [_, inner] = run_all(schedule)
    assert inner.inputs[Action(2, "F", 0)] == chain(schedule)[Action(2, "F", 0)] != [0.0]


class Only:
    """An order of some positions."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions
        self.handed_over: list[Message] = []

    def expected(self) -> list[Expected]:
        return []

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def handed(self, message: Message) -> None:
        self.handed_over.append(message)


def run_order(schedule: Schedule, rank: int, order: Only) -> fake.Compute:
    compute = fake.Compute()
    table = fake.table_of(schedule, rank)
    fake.executor(table, compute, fake.Wire(rank), order=order).run()
    return compute


def test_the_order_decides_and_hears_of_what_stays() -> None:
    schedule = generate("zb-v", 2, 1)
    row = schedule.rows[1]
    order = Only(*range(len(row) - 2), len(row) - 1, len(row) - 2)
    compute = run_order(schedule, 1, order)
    actions = [entry for entry in compute.log if not entry.startswith(("free", "release"))]
    assert actions == [str(row[position]) for position in order.positions]
    assert order.handed_over == [Message("F", 2, 0), Message("B", 1, 0)]


@pytest.mark.parametrize(("schedule", "skipped"), [("1f1b", "0B1"), ("zb-h1", "0W1")])
def test_an_action_that_was_never_executed_is_named(schedule: str, skipped: str) -> None:
    made = generate(schedule, 2, 2)
    row = made.rows[0]
    kept = [position for position, action in enumerate(row) if str(action) != skipped]
    with pytest.raises(MegatronExtError, match=f"{skipped} was never executed"):
        run_order(made, 0, Only(*kept))


def test_an_action_cannot_run_before_what_it_takes() -> None:
    schedule = generate("zb-v", 2, 1)
    last = schedule.rows[1].index(Action(2, "F", 0))
    with pytest.raises(MegatronExtError, match="2F0 cannot run before the activation"):
        run_order(schedule, 1, Only(last))


def test_what_an_action_raises_ends_the_step_at_once() -> None:
    log: list[str] = []
    table = fake.table_of(generate("1f1b", 2, 2), 1)
    compute = fake.Compute(log, fail_at=Action(1, "B", 0))
    with pytest.raises(RuntimeError, match="1B0 fails"):
        fake.executor(table, compute, fake.Wire(1, log), fake.Sync(log)).run()
    assert [entry for entry in log if not entry.startswith("free")][-1] == "1B0"


def test_a_timeout_names_rank_action_sender_and_message() -> None:
    table = fake.table_of(generate("1f1b", 2, 2), 1)
    with pytest.raises(TransportTimeout) as caught:
        fake.executor(table, fake.Compute(), fake.Wire(1, absent=False)).run()
    for part in ("rank 1", "1F0, action 0 of its 4", "rank 0", str(Message("F", 1, 0))):
        assert part in str(caught.value)


def test_all_that_arrives_is_announced_with_its_form() -> None:
    table = fake.table_of(generate("interleaved", 2, 4, 2), 0)
    program = fake.program_of(table)
    taken = [t for exchange in program.exchanges for t in exchange.inputs]
    assert {(t.peer, t.message) for t in taken} == {(e.source, e.message) for e in program.expected}
    assert {(e.shape, e.dtype) for e in program.expected} == {((1,), fake.DTYPE)}


@dataclass
class Listening(Observer):
    """Writes down what it hears."""

    log: list[str]
    executed: Sequence[Executed] = ()

    def begin_action(self, action: Action) -> None:
        self.log.append(f"begin {action}")

    def end_action(self, position: int, action: Action) -> None:
        self.log.append(f"end {action} at {position}")

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        self.executed = list(executed)
        assert wall_s >= sum(duration_s for _, _, duration_s in executed) > 0


def test_observers_hear_of_each_action_before_its_results_leave() -> None:
    log: list[str] = []
    table = fake.table_of(generate("1f1b", 2, 1), 1)
    listening, measured = Listening(log), Measured()
    observers = [listening, StepMeasure(table, measured)]
    fake.executor(table, fake.Compute(log), fake.Wire(1, log), observers=observers).run()
    place = log.index("begin 1B0")
    assert log[place : place + 4] == ["begin 1B0", "1B0", "end 1B0 at 1", "send B0.0.0 to 0"]
    assert [str(action) for _, action, _ in listening.executed] == ["1F0", "1B0"]
    assert (measured.steps, measured.actions, measured.out_of_order) == (1, 2, 0)
    assert measured.peak_live == 1


class Hearing(TransportObserver):
    """Writes down every call."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "heard" or not hasattr(TransportObserver, name) or name.startswith("__"):
            return object.__getattribute__(self, name)
        return lambda *args: self.heard.append((name, *args))


def test_an_observed_transport_tells_of_each_message_and_wait() -> None:
    wire, hearing = fake.Wire(0), Hearing()
    message = Message("B", 0, 0)
    wire.poll = lambda timeout_s: [message]  # type: ignore[method-assign]
    observed = ObservedTransport(wire, hearing)
    announced = [Expected(1, message, None, torch.float32)]
    observed.begin(announced, 1)
    observed.isend(torch.ones(3), 1, Message("F", 1, 0))
    observed.poll(0.0)
    observed.poll(1.0)
    observed.recv(1, message, 1.0)
    observed.flush(1.0)
    assert hearing.heard == [
        ("begin_messages", announced),
        ("begin_send", Message("F", 1, 0), 1),
        ("end_send", Message("F", 1, 0), 1, 12),
        ("arrived", [message]),
        ("begin_wait", "input"),
        ("end_wait", "input", [message]),
        ("begin_receive", message, 1),
        ("end_receive", message, 1, 8, 0.0),
        ("begin_wait", "slot"),
        ("end_wait", "slot", ()),
    ]
