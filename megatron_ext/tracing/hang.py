"""Follows the waits across ranks to the rank that blocks all others. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

__all__ = ["RankState", "Verdict", "explain"]


@dataclass(frozen=True)
class RankState:
    """The reported state of a rank."""

    rank: int
    what: str
    """After `rank 3 `: `runs 5F3`, `waits`, `is in the optimizer step`."""
    waits_for: Sequence[tuple[int, str]] = ()
    """(global rank, what of it) that would end its wait, any of them."""
    collective: str = ""
    """The collective that it is in: it waits for everybody who is not."""
    since_s: float = 0.0
    """How long it has been doing that."""
    where: str = ""
    """The line of the program that its training thread is at."""

    def dumps(self) -> str:
        """Return the state as text for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RankState:
        """Return the state that `dumps` wrote."""
        found = json.loads(text)
        found["waits_for"] = tuple((rank, what) for rank, what in found["waits_for"])
        return cls(**found)

    def __str__(self) -> str:
        """Return the state in one line."""
        return f"rank {self.rank} {self._doing()} for {self.since_s:.1f} s{self.place}"

    def _doing(self) -> str:
        if not self.waits_for:
            return self.what
        named = [f"{what} of rank {rank}" for rank, what in self.waits_for[:4]]
        more = f" or {len(self.waits_for) - 4} others" if len(self.waits_for) > 4 else ""
        return f"waits for {' or '.join(named)}{more}"

    @property
    def place(self) -> str:
        """Return the position of the training thread after a comma, or nothing if unknown."""
        return f", at {self.where}" if self.where else ""


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang."""

    chain: str
    """`rank 2 waits for 5B3 of rank 3, which ...`"""
    culprits: tuple[int, ...]
    """The ranks that the others wait for."""

    @property
    def message(self) -> str:
        """Return the error text."""
        if len(self.culprits) == 1:
            return f"rank {self.culprits[0]} holds the job up: {self.chain}"
        who = ", ".join(map(str, self.culprits))
        return f"ranks {who} hold each other up: {self.chain}"


def explain(states: Mapping[int, RankState], num_ranks: int, start: int) -> Verdict:
    """Follow the waits from a rank to the one that waits for nobody.

    Args:
        states: By rank; missing ranks did not answer.
        num_ranks: Ranks of the job.
        start: The rank to begin with.
    """
    path, parts = [start], []
    while True:
        state = states.get(path[-1])
        if state is None:
            parts.append("says nothing: its process is gone, is stopped, or reaches nobody")
            break
        steps = _next(state, states, num_ranks)
        if not steps:
            parts.append(f"{state.what} for {state.since_s:.1f} s{state.place}")
            break
        fresh = [step for step in steps if step[0] not in path]
        rank, what = (fresh or steps)[0]
        if state.collective:
            parts.append(f"is in {state.collective} and waits there for rank {rank}")
        else:
            parts.append(f"waits for {what} of rank {rank}")
        if not fresh:
            circle = path[path.index(rank) :]
            parts.append("was named before: their tables do not fit each other")
            return Verdict(f"rank {start} {', which '.join(parts)}", tuple(sorted(circle)))
        path.append(rank)
    return Verdict(f"rank {start} {', which '.join(parts)}", (path[-1],))


def _next(
    state: RankState, states: Mapping[int, RankState], num_ranks: int
) -> Sequence[tuple[int, str]]:
    """Return the ranks that a rank waits for: silent ones first, then those that wait too."""
    if state.collective:
        others = [rank for rank in range(num_ranks) if rank != state.rank]
        absent = [
            rank
            for rank in others
            if rank not in states or states[rank].collective != state.collective
        ]
        return [(rank, "") for rank in absent]
    return sorted(state.waits_for, key=lambda step: step[0] in states)
