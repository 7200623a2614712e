"""Orders that several generators share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from megatron_ext.schedules.representation.actions import Action, Kind

__all__ = ["alternate", "expand"]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then one forward and one backward in turn, then the rest."""
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += (forward, backward)
    row += backwards[len(forwards) - warm_up :]
    return tuple(row)


def expand(phases: Iterable[tuple[str, int]], stages: Sequence[int]) -> tuple[Action, ...]:
    """Return the row that a list of phases describes.

    Args:
        phases: Steps and how often they are repeated. A step names a kind and a chunk, as in
            `F0 I1 W1`, and takes the next micro-batch that this kind of pass has not had on that
            chunk; `W` alone takes the oldest I, of either chunk, that has no W yet.
        stages: The stage of each chunk.
    """
    counts: dict[tuple[str, int], int] = {}
    pending: deque[Action] = deque()
    row: list[Action] = []
    for steps, repeats in phases:
        for step in steps.split() * repeats:
            if step == "W":
                row.append(pending.popleft())
                continue
            kind, chunk = step[0], int(step[1:])
            key = "F" if kind == "F" else "W" if kind == "W" else "backward", chunk
            microbatch = counts.get(key, 0)
            counts[key] = microbatch + 1
            action = Action(stages[chunk], _KIND[kind], microbatch)
            row.append(action)
            if kind == "I":
                pending.append(action._replace(kind="W"))
    return tuple(row)


_KIND: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
