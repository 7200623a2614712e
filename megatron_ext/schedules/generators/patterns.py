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
    split = [(steps.split(), repeats) for steps, repeats in phases]
    leaves_weights = any("W" in steps for steps, _ in split)
    counts: dict[str, int] = {}
    pending: deque[Action] = deque()
    row: list[Action] = []
    for steps, repeats in split:
        parsed = [_parsed(step, stages) for step in steps]
        for kind, stage, counter in parsed * repeats:
            if stage < 0:
                row.append(pending.popleft())
                continue
            microbatch = counts.get(counter, 0)
            counts[counter] = microbatch + 1
            row.append(Action(stage, kind, microbatch))
            if leaves_weights and kind == "I":
                pending.append(Action(stage, "W", microbatch))
    return tuple(row)


def _parsed(step: str, stages: Sequence[int]) -> tuple[Kind, int, str]:
    """Return kind, stage and counter of a step; for `W` alone the stage is -1."""
    if step == "W":
        return "W", -1, step
    kind, chunk = _KIND[step[0]], step[1:]
    return kind, stages[int(chunk)], ("backward" if kind in ("B", "I") else kind) + chunk


_KIND: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
