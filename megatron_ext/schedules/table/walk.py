"""Runs a table symbolically. All code that follows a table across ranks uses `walk`.

Every rank runs its row until it needs a tensor that does not exist yet, and continues once another
rank has produced that tensor. This is Kahn's algorithm over the tensors and the ranks' orders. The
visitor decides which value represents a tensor: its arrival time (`search/simulate.py`) or just
True (`stuck`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import KINDS, Action, Kind, Schedule

Visit = Callable[[int, int, Any], Any]
"""(rank, position in its row, value of the action's input tensor) -> value of the output tensor, or
two values if two ranks need it. A pair is a single visit, which takes and returns two values."""


def check_for_deadlock(schedule: Schedule) -> None:
    """Check that no ranks wait for each other forever, however long actions and messages take.

    The table must contain every action once, on its stage's rank (`validation.check_actions`).

    Raises:
        ScheduleError: The ranks deadlock; the message shows the cycle.
    """
    waiting = stuck(schedule)
    if waiting:
        raise ScheduleError(_cycle_message(schedule, waiting))


def stuck(schedule: Schedule) -> dict[int, int]:
    """Return the ranks that cannot finish and the position where each of them waits."""
    return walk(schedule, lambda _rank, _index, _taken: (True, True))


def walk(schedule: Schedule, visit: Visit) -> dict[int, int]:
    """Visit every action once its tensors exist and all earlier actions on its rank have run.

    Returns:
        The ranks that did not finish and the position where each of them waits. Empty if all
        ranks finished.
    """
    walking = _Walk(schedule, visit)
    # A stack with rank 0, which has the first forward pass, on top.
    num_ranks = len(schedule.rows)
    walking.runnable = list(reversed(range(num_ranks)))
    while walking.runnable:
        walking.run(walking.runnable.pop())
    return walking.waiting


class _Tensors(NamedTuple):
    """An action's tensor numbers for micro-batch 0, slice 0; -1 means no tensor."""

    needed: int
    produced: int
    copy: int
    """A second output with the same content, if two ranks need the result."""


class _Walk:
    """A walk over a table. Tensors are identified by number, as there may be millions."""

    def __init__(self, schedule: Schedule, visit: Visit) -> None:
        num_ranks = len(schedule.rows)
        num_places = schedule.num_stages * schedule.places_per_stage
        self._rows = schedule.rows
        self._pairs = [schedule.pairs_of(rank) for rank in range(num_ranks)]
        self._num_slices = schedule.num_slices
        self._visit = visit
        self._tensors = _tensors(schedule)
        # By tensor number: its value, or None if it does not exist yet. Every place has an
        # activation, a gradient and an input of R.
        self._values: list[Any] = [None] * (3 * num_places)
        # By rank: the position of its next action.
        self._positions = [0] * num_ranks
        # By number of the missing tensor: the rank that waits for it.
        self._awaited: dict[int, int] = {}
        self.runnable: list[int] = []
        """Stack of ranks that may continue; the last one is next."""
        self.waiting: dict[int, int] = {}
        """By rank: the position of the action that is missing a tensor."""

    def run(self, rank: int) -> None:
        """Visit a rank's actions until one of them is missing a tensor."""
        row = self._rows[rank]
        pairs = self._pairs[rank]
        index = self._positions[rank]
        # Use local variables for speed, because this loop runs for millions of actions.
        tensors = self._tensors
        values = self._values
        awaited = self._awaited
        num_slices = self._num_slices
        visit = self._visit
        while index < len(row):
            stage, kind, microbatch, slice_index = row[index]
            offset = microbatch * num_slices + slice_index
            needed, produced, copy = tensors[kind][stage]
            value = None
            if needed >= 0:
                # Tensors are numbered by kind and stage first, so micro-batch and slice
                # form an offset.
                value = values[needed + offset]
                if value is None:
                    self._wait(rank, index, needed + offset)
                    return
            if index in pairs:
                if not self._run_pair(rank, index, value):
                    return
                index += 2
                continue
            result = visit(rank, index, value)
            if copy >= 0:
                result, copied = result
                self._hand_over(copy + offset, copied)
            index += 1
            # For speed, do not call `_hand_over` here: nearly every action produces a
            # tensor.
            if produced >= 0:
                values[produced + offset] = result
                if produced + offset in awaited:
                    self.runnable.append(awaited.pop(produced + offset))
        self._positions[rank] = index
        self.waiting.pop(rank, None)

    def _run_pair(self, rank: int, index: int, forward_value: Any) -> bool:
        """Visit a pair whose F has its tensor. Return False if its backward pass has none.

        Both actions wait for the tensors of both, and their results exist once both have finished.
        """
        row = self._rows[rank]
        stage, kind, microbatch, slice_index = row[index]
        forward_offset = microbatch * self._num_slices + slice_index
        forward = self._tensors[kind][stage]
        stage, kind, microbatch, slice_index = row[index + 1]
        backward_offset = microbatch * self._num_slices + slice_index
        backward = self._tensors[kind][stage]
        backward_value = None
        if backward.needed >= 0:
            number = backward.needed + backward_offset
            backward_value = self._values[number]
            if backward_value is None:
                self._wait(rank, index, number, partner=True)
                return False
        values = (forward_value, backward_value)
        result, backward_result = self._visit(rank, index, values)
        if backward.produced >= 0:
            self._hand_over(backward.produced + backward_offset, backward_result)
        if forward.produced >= 0:
            self._hand_over(forward.produced + forward_offset, result)
        return True

    def _wait(
        self,
        rank: int,
        index: int,
        number: int,
        *,
        partner: bool = False,
    ) -> None:
        """Stop a rank before an action or pair until a tensor exists."""
        self._positions[rank] = index
        self._awaited[number] = rank
        # For pairs, errors name the action that is missing the tensor.
        if partner:
            index += 1
        self.waiting[rank] = index

    def _hand_over(self, number: int, value: Any) -> None:
        self._values[number] = value
        if number in self._awaited:
            self.runnable.append(self._awaited.pop(number))


def _tensors(schedule: Schedule) -> dict[Kind, list[_Tensors]]:
    """Return all actions' tensors for micro-batch 0, slice 0, by kind and stage.

    Tensors are numbered by the stage, micro-batch and slice that need them: first activations, then
    gradients, then R's inputs.
    """
    per_stage = schedule.places_per_stage
    count = schedule.num_stages * per_stage
    # By kind: the first number. B and I need the same tensor, the stage's output
    # gradient.
    base = {
        "F": 0,
        "B": count,
        "I": count,
        "R": 2 * count,
    }
    produced_by: dict[Kind, list[list[int]]] = {}
    existing: set[int] = set()
    for kind, outputs_by_stage in schedule.links.items():
        produced_by[kind] = []
        for outputs in outputs_by_stage:
            numbers = []
            for output in outputs:
                target = output.target
                numbers.append(base[target.kind] + target.stage * per_stage)
            produced_by[kind].append(numbers)
            existing.update(numbers)
    tensors: dict[Kind, list[_Tensors]] = {}
    for kind in KINDS:
        tensors[kind] = []
        for stage, numbers in enumerate(produced_by[kind]):
            needed = -1
            if kind != "W":
                number = base[kind] + stage * per_stage
                # If no action produces the tensor, it is data or the loss, which exist
                # from the start.
                if number in existing:
                    needed = number
            produced = numbers[0] if numbers else -1
            # Only disaggregated tables have two receivers, because their F feeds
            # another F and an R.
            copy = numbers[1] if len(numbers) > 1 else -1
            tensors[kind].append(_Tensors(needed, produced, copy))
    return tensors


class _Wait(NamedTuple):
    """A rank's waiting action and the action that it waits for."""

    rank: int
    action: Action
    needed: Action
    peer: int
    """The rank that runs the needed action."""


def _cycle_message(schedule: Schedule, position: dict[int, int]) -> str:
    """Follow the waiting ranks until one of them repeats, and describe that cycle."""
    # By rank, in walk order.
    waits: dict[int, _Wait] = {}
    rank = min(position)
    while rank not in waits:
        action = schedule.rows[rank][position[rank]]
        # At most one of an action's inputs comes from another stage or rank, and that
        # one is missing.
        [needed] = [
            source
            for source in schedule.needs(action)
            if schedule.travels(source, action)
        ]
        peer = schedule.placement.rank_for(needed.stage, needed.kind)
        waits[rank] = _Wait(rank, action, needed, peer)
        rank = peer
    lines = ["the ranks' orders form a cycle, so these actions wait for each other:"]
    # The ranks before the first repeated rank lead into the cycle but are not part of
    # it.
    cycle_start = list(waits).index(rank)
    cycle = list(waits.values())[cycle_start:]
    for wait in cycle:
        blocking = schedule.rows[wait.peer][position[wait.peer]]
        lines.append(
            f"  {wait.action} on rank {wait.rank} needs {wait.needed}, "
            f"which comes after {blocking}"
        )
        marked = schedule.marked(wait.rank, position[wait.rank])
        lines.append(f"  {marked}")
    lines.append(
        "put every action after the actions that it needs, in an order that all ranks share"
    )
    return "\n".join(lines)
