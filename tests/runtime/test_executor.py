"""The real executor on a wire in memory: what it runs, in which order, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import MegatronExtError, TransportTimeout
from megatron_ext.message import Message
from megatron_ext.observer import Executed, Observer
from megatron_ext.schedules import Action, Schedule, generate
from megatron_ext.schedules.table import table_files

from . import fake
from .threads_as_ranks import by_rank, chain, run_all, sized

if TYPE_CHECKING:
    from megatron_ext.runtime.program import Table
    from megatron_ext.transport.base import Expected


@settings(max_examples=40)
@given(sized(), st.integers(1, 2))
def test_every_action_gets_the_inputs_of_the_model(
    schedule: Schedule, num_parts: int
) -> None:
    for row, compute, expected in by_rank(schedule, num_parts):
        assert compute.log == list(compute_log(compute.log, row)), (
            "the order of the table"
        )
        for action, values in compute.inputs.items():
            if action.kind != "W":
                wanted = expected(action)
                assert values == [
                    value + part for value in wanted for part in range(num_parts)
                ]


def compute_log(log: Sequence[str], row: Sequence[Action]) -> Iterator[str]:
    """Yield a log with its actions in the order of a row."""
    actions = iter(row)
    for entry in log:
        yield (
            entry
            if entry == "release" or entry.startswith("free")
            else str(next(actions))
        )


@settings(max_examples=25)
@given(sized())
def test_gradients_are_summed_in_the_order_of_the_table(schedule: Schedule) -> None:
    for row, compute, expected in by_rank(schedule):
        for stage, summed in compute.gradients.items():
            ends = [a for a in row if a.stage == stage and a.kind in "BW"]
            assert [microbatch for microbatch, _ in summed] == [
                a.microbatch for a in ends
            ]
            for microbatch, value in summed:
                inputs = [Action(stage, kind, microbatch) for kind in ("B", "F")]
                assert value == sum(
                    number for action in inputs for number in expected(action)
                )


@settings(max_examples=25)
@given(sized())
def test_gathers_precede_and_reductions_follow_all_of_a_stage(
    schedule: Schedule,
) -> None:
    for rank, row in enumerate(schedule.rows):
        log: list[str] = []
        compute, sync = fake.Compute(log), fake.Sync(log)
        table = fake.table_of(schedule, rank)
        fake.executor(table, compute, fake.Wire(rank), sync).run()
        for stage in schedule.placement.stages_of[rank]:
            places = [log.index(str(action)) for action in row if action.stage == stage]
            assert log.index(f"gather {stage}") < min(places)
            assert log.index(f"reduce {stage}") > max(places)
            assert [log.count(f"{what} {stage}") for what in ("gather", "reduce")] == [
                1,
                1,
            ]
            final = [a for a in row if a.stage == stage][-1]
            assert f"last {final}" in log


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
        "begin", "gather 1", "receive F1.0.0 from 0", "1F0", "last 1B0", "1B0",
        "send B0.0.0 to 0", "free 1.0", "reduce 1", "flush",
    ]  # fmt: skip


def test_outputs_are_released_once_they_have_left() -> None:
    _, log = lone("1f1b", 0, 2, 1)
    assert log[:5] == ["begin", "gather 0", "0F0", "send F1.0.0 to 1", "release"]


def test_a_tensor_stays_on_its_rank_between_two_of_its_stages() -> None:
    """The inner turn of a V: no message, and an activation that is a leaf of its own."""
    _, log = lone("zb-v", 1, 2, 1)
    turn = log.index("1F0")
    assert log[turn : turn + 4] == ["1F0", "release", "gather 2", "2F0"]
    assert not any("F2.0" in entry or "B1.0" in entry for entry in log)


def test_a_handed_activation_survives_the_release_of_its_maker() -> None:
    schedule = generate("zb-v", 2, 1)
    [_, inner] = run_all(schedule)
    assert (
        inner.inputs[Action(2, "F", 0)] == chain(schedule)[Action(2, "F", 0)] != [0.0]
    )


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
    actions = [
        entry for entry in compute.log if not entry.startswith(("free", "release"))
    ]
    assert actions == [str(row[position]) for position in order.positions]
    assert order.handed_over == [Message("F", 2, 0), Message("B", 1, 0)]


@pytest.mark.parametrize(("schedule", "skipped"), [("1f1b", "0B1"), ("zb-h1", "0W1")])
def test_an_action_that_was_never_executed_is_named(
    schedule: str, skipped: str
) -> None:
    made = generate(schedule, 2, 2)
    row = made.rows[0]
    kept = [position for position, action in enumerate(row) if str(action) != skipped]
    with pytest.raises(MegatronExtError, match=f"{skipped} was never executed"):
        run_order(made, 0, Only(*kept))


def test_both_of_a_pair_wait_for_all_inputs_and_hand_on_at_its_end() -> None:
    rows = (
        "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,1B2\n"
    )
    schedule, log = table_files.from_csv(rows, "csv:pairs.csv"), list[str]()
    table, seen = fake.table_of(schedule, 0), Seen()
    fake.executor(table, fake.Compute(log), fake.Wire(0, log), observers=[seen]).run()
    begin = log.index("receive B0.0.0 from 1")
    assert log[begin : begin + 5] == [
        "receive B0.0.0 from 1", "0F2", "0B0", "send F1.2.0 to 1", "release",
    ]  # fmt: skip
    at = seen.log.index("begin 0F2")
    assert seen.log[at : at + 4] == ["begin 0F2", "begin 0B0", "end 3 0B0", "end 2 0F2"]
    assert seen.positions == list(range(len(schedule.rows[0])))


class Seen(Observer):
    """Notes what an observer learns."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.positions: list[int] = []

    def begin_action(self, action: Action) -> None:
        self.log.append(f"begin {action}")

    def end_action(self, position: int, action: Action) -> None:
        self.log.append(f"end {position} {action}")

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        self.positions = [position for position, _, _ in executed]


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
    assert {(t.peer, t.message) for t in taken} == {
        (e.source, e.message) for e in program.expected
    }
    assert {(e.shape, e.dtype) for e in program.expected} == {((1,), fake.DTYPE)}
