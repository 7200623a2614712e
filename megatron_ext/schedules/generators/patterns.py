"""Orders that several generators share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from megatron_ext.schedules.table.actions import Action, Row


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then forwards and backwards alternating, then the rest."""
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += (forward, backward)
    row += backwards[len(forwards) - warm_up :]
    return tuple(row)


def shortened(rows: Sequence[Row], num_microbatches: int) -> tuple[Row, ...]:
    """Return the rows of a longer table with its first micro-batches only.

    Actions of different micro-batches depend on each other only through their order on a rank. So
    what is left of a table that ends still ends, in the same order and with no more activations.
    """
    return tuple(
        tuple(action for action in row if action.microbatch < num_microbatches) for row in rows
    )


def expand(phases: Iterable[tuple[str, int]], stages: Sequence[int]) -> tuple[Action, ...]:
    """Return the row that a list of phases describes.

    Args:
        phases: Steps and their number of repetitions. A step names a kind and a chunk, as in
            `F0 I1 W1`, and runs the next micro-batch of this kind on that chunk; `W` alone runs
            the W of the oldest pending I, of either chunk.
        stages: The stage of each chunk.
    """
    counts: Counter[str] = Counter()
    weights: deque[Action] = deque()  # the W of each I, in the order of the I
    row: list[Action] = []
    for steps, repeats in phases:
        # A step of a phase: kind and stage of its action, and the counter of its micro-batch, which
        # B and I share.
        parsed = [
            (step[0], stages[int(step[1:])], step.replace("I", "B")) if step != "W" else None
            for step in steps.split()
        ]
        for _ in range(repeats):
            for step in parsed:
                if step is None:
                    row.append(weights.popleft())
                    continue
                kind, stage, counter = step
                row.append(Action(stage, kind, counts[counter]))  # type: ignore[arg-type]
                counts[counter] += 1
                if kind == "I":
                    weights.append(Action(stage, "W", row[-1].microbatch))
    return tuple(row)
