"""Action orders shared by several generators."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_ext.schedules.table.actions import Action, Row

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Kind


def passes(
    stage: int,
    kind: Kind,
    microbatches: Iterable[int],
) -> list[Action]:
    """Return one kind of action on a stage for several micro-batches."""
    return [Action(stage, kind, microbatch) for microbatch in microbatches]


def alternate(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    warm_up: int,
) -> Row:
    """Return `warm_up` forward passes, then alternating forward and backward passes."""
    row = list(forwards[:warm_up])
    steady_forwards = forwards[warm_up:]
    for forward, backward in zip(steady_forwards, backwards, strict=False):
        row += (forward, backward)
    # The drain has as many backward passes as the warm-up has forward passes.
    num_steady = len(forwards) - warm_up
    row += backwards[num_steady:]
    return tuple(row)


def shortened(
    rows: Sequence[Row],
    num_microbatches: int,
) -> tuple[Row, ...]:
    """Return the rows of a longer table, truncated to its first micro-batches.

    Actions of different micro-batches depend on each other only through their order on a rank, so
    if the longer table completes, so does the shortened one. The shortened table preserves the
    order of the actions and needs no more activations.
    """
    shorter_rows: list[Row] = []
    for row in rows:
        shorter_row = []
        for action in row:
            if action.microbatch < num_microbatches:
                shorter_row.append(action)
        shorter_rows.append(tuple(shorter_row))
    return tuple(shorter_rows)


def expand(
    phases: Iterable[tuple[str, int]],
    stages: Sequence[int],
) -> Row:
    """Return the row that a list of phases describes.

    Args:
        phases: Steps and how often to repeat them. A step such as `F0` or `I1` names a kind and a
            chunk and runs this kind for the chunk's next micro-batch. A step with only `W` runs the
            W for the oldest pending I on any chunk.
        stages: The stage number of every chunk.
    """
    # By counter (`_Step`): the number of micro-batches that have run so far.
    counts: Counter[str] = Counter()
    # The pending W of every I that has run, oldest first.
    weights: deque[Action] = deque()
    row: list[Action] = []
    for steps, repeats in phases:
        parsed = [_parsed(step, stages) for step in steps.split()]
        for _ in range(repeats):
            for step in parsed:
                if step is None:
                    row.append(weights.popleft())
                    continue
                kind, stage, counter = step
                microbatch = counts[counter]
                counts[counter] += 1
                row.append(Action(stage, kind, microbatch))
                if kind == "I":
                    weights.append(Action(stage, "W", microbatch))
    return tuple(row)


# This is a plain tuple, because `expand` unpacks one for each of millions of actions,
# and named tuples are slower.
_Step = tuple["Kind", int, str]
"""(kind, stage, counter). Steps that share a counter take turns with the micro-batches."""


def _parsed(step: str, stages: Sequence[int]) -> _Step | None:
    """Parse a step in a phase. None stands for the oldest pending W."""
    if step == "W":
        return None
    kind = step[0]
    chunk = int(step[1:])
    # B and I share a counter, because every micro-batch runs either B or I on a chunk.
    counter = step.replace("I", "B")
    return kind, stages[chunk], counter  # type: ignore[return-value]
