"""Orders that several generators share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

from megatron_ext.schedules.table.actions import Action, Kind, Row


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
    split = [([_parsed(step, stages) for step in steps.split()], n) for steps, n in phases]
    leaves_weights = any(stage < 0 for steps, _ in split for _, stage, _ in steps)
    counts: Counter[str] = Counter()
    weights: list[Action] = []  # the W of each I, in the order of the I
    row: list[Action] = []
    for steps, repeats in split:
        numbers = _numbers([counter for _, _, counter in steps], repeats, counts)
        if leaves_weights:
            inputs = [n for n, (kind, _, _) in enumerate(steps) if kind == "I"]
            weights += _in_turn([_actions(steps[n][1], "W", numbers[n]) for n in inputs])
        row += _in_turn(
            [
                map(weights.__getitem__, which) if stage < 0 else _actions(stage, kind, which)
                for (kind, stage, _), which in zip(steps, numbers, strict=True)
            ]
        )
    return tuple(row)


def _numbers(counters: Sequence[str], repeats: int, counts: Counter[str]) -> list[range]:
    """Return the micro-batches of each step of a phase, and advance the counters past it."""
    # A phase that names a chunk twice, as `F0 I0 F0` does, takes every second micro-batch at each.
    strides, seen = Counter(counters), Counter[str]()
    numbers = []
    for counter in counters:
        first, stride = counts[counter] + seen[counter], strides[counter]
        numbers.append(range(first, first + repeats * stride, stride))
        seen[counter] += 1
    for counter, stride in strides.items():
        counts[counter] += repeats * stride
    return numbers


def _actions(stage: int, kind: Kind, microbatches: range) -> Iterator[Action]:
    """Make one action for each micro-batch, fast enough for tables of millions of actions."""
    fields = zip(repeat(stage), repeat(kind), microbatches, repeat(0))
    return map(tuple.__new__, repeat(Action), fields)


def _in_turn(columns: Sequence[Iterator[Action]]) -> Iterator[Action]:
    """Take the first of each column, then the second of each, and so on."""
    return chain.from_iterable(zip(*columns, strict=True))


def _parsed(step: str, stages: Sequence[int]) -> tuple[Kind, int, str]:
    """Return kind, stage and counter of a step; for `W` alone the stage is -1."""
    if step == "W":
        return "W", -1, step
    kind, chunk = _KIND[step[0]], step[1:]
    return kind, stages[int(chunk)], ("backward" if kind in ("B", "I") else kind) + chunk


_KIND: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
