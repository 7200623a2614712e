"""Lower bound on the time of a schedule's table for any cut of the layers that fits into memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.planning.layer_costs import Part, beside, total

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule


class RowUse(NamedTuple):
    """What a bound needs of a rank's row. Positions are those of its own stages, in order."""

    moments: list[list[tuple[int, int]]]
    """Micro-batches that each stage keeps, and weight gradients that wait: at all moments that no
    other exceeds, of more than two stages at the two fullest alone."""
    pairs: Counter[tuple[int, int]]
    """By positions of forward and backward."""


def uses_of(table: Schedule) -> list[RowUse]:
    """Return what a bound needs of each row."""
    found = []
    for rank, row in enumerate(table.rows):
        at = {stage: n for n, stage in enumerate(table.placement.stages_of[rank])}
        now, moments = [0] * 2 * len(at), set()
        for stage, kind, *_ in row:
            now[2 * at[stage]] += {"F": 1, "W": 0}.get(kind, -1)
            now[2 * at[stage] + 1] += {"I": 1, "W": -1}.get(kind, 0)
            moments.add(tuple(now))
        most = {max(moments, key=sum), max(moments, key=lambda one: (min(one[::2]), sum(one)))}
        if len(at) <= 2:
            most = {
                one
                for one in moments
                if not any(one != two and all(map(le, one, two)) for two in moments)
            }
        pairs = Counter((at[row[n].stage], at[row[n + 1].stage]) for n in table.pairs_of(rank))
        kept = [[*zip(each[::2], each[1::2], strict=True)] for each in most]
        found.append(RowUse(kept, pairs))
    return found


@dataclass(frozen=True, kw_only=True)
class CutBound:
    """A table, and what its ranks have time and memory for.

    A rank runs its row behind the forwards of the stages before its first action, and before the
    backwards of those before its last. So until any time it finishes only so many layers of a kind,
    and its memory takes only so many: in the time that is returned all layers of each kind find a
    rank. All ways of a rank to share out its layers to one or two stages are tried; more than two
    are treated as one that is for each layer as cheap as the cheapest.
    """

    table: Schedule
    uses: Sequence[RowUse]
    layers: Sequence[Part]
    first: Part
    last: Part
    least: Sequence[int]
    """Layers that each stage needs."""
    overlap: float
    """Share of the exchange that pairs hide at most."""
    later: float
    """Micro-batches of a row beyond those of the table."""
    limit: float
    """Bytes of a rank."""
    static: Callable[[Part], float]
    """Bytes of weights, gradients and optimizer."""

    def span_s(self) -> float:
        """Return a time that no cut beats, in seconds; infinite if none fits."""
        if sum(self.least) > len(self.layers):
            return math.inf
        span, waits, owners = 0.0, list(map(self._waits, self.table.rows)), self._owners
        for layer, count in Counter(self.layers).items():
            left, heap = count, []
            memory = [self._memory(rank, layer) for rank in range(len(waits))]
            for rank, wait in enumerate(waits):
                span = max(span, wait + self._rank_s(rank, 0, layer, memory[rank]))
                left -= sum(self.least[s] for s in owners[rank] if layer in self._kinds[s])
                heap.append((wait + self._rank_s(rank, 1, layer, memory[rank]), rank, 1))
            heapify(heap)
            for _ in range(left):
                now, rank, more = heap[0]
                span = max(span, now)
                if span == math.inf:
                    return span
                then = waits[rank] + self._rank_s(rank, more + 1, layer, memory[rank])
                heapreplace(heap, (then, rank, more + 1))
        return span

    @property
    def _owners(self) -> tuple[tuple[int, ...], ...]:
        return self.table.placement.stages_of

    @cached_property
    def _kinds(self) -> list[set[Part]]:
        """The layers that a stage may have, whatever the cut."""
        starts, spare = [0, *accumulate(self.least)], len(self.layers) - sum(self.least)
        return [set(self.layers[begin : end + spare]) for begin, end in pairwise(starts)]

    @cached_property
    def _fixed(self) -> list[Part]:
        """The least that each stage computes and keeps, whatever the cut."""
        found = []
        for s, kinds in enumerate(self._kinds):
            parts = [self.first] * (s == 0) + [self.last] * (s == len(self.least) - 1)
            if self.least[s] and len(kinds) == 1:
                parts += kinds
            elif self.least[s]:
                least = min((beside(each, self.overlap) for each in kinds), key=lambda p: p.work)
                parts.append(
                    Part._make(map(min, zip(*kinds, strict=True)))._replace(
                        forward=least.forward, input=least.input, weight=least.weight, exchange=0.0
                    )
                )
            found.append(total(parts))
        return found

    def _waits(self, row: Sequence[tuple[int, str, int, int]]) -> float:
        """Return the seconds before the first action of a row and after its last."""
        begin, (end, kind, *_) = row[0][0], row[-1]
        after = [beside(part, self.overlap) for part in self._fixed[: end if kind != "W" else 0]]
        wait = sum(part.input + part.weight * (kind == "B") for part in after)
        return wait + sum(part.forward for part in self._fixed[:begin])

    def _rank_s(
        self, rank: int, count: int, layer: Part, memory: Sequence[Sequence[float]]
    ) -> float:
        """Return the least that a rank runs if its stages have so many more layers of a kind."""
        width = len(self._owners[rank])
        if width == 2:
            ways: list[tuple[int, ...]] = [(n, count - n) for n in range(count + 1)]
        else:
            ways = [tuple(count * (n == at) for n in range(width)) for at in range(width)]
        held = []
        for way in ways:
            own = memory[0]
            for more, each in zip(way, memory[1:], strict=True):
                own = (
                    [one + more * two for one, two in zip(own, each, strict=True)] if more else own
                )
            held.append(own)
        if width <= 2:
            ways = [way for way, own in zip(ways, held, strict=True) if max(own) <= self.limit]
        elif any(min(each) > self.limit for each in zip(*held, strict=True)):
            return math.inf
        return min((self._seconds(rank, way, layer) for way in ways), default=math.inf)

    def _seconds(self, rank: int, more: Sequence[int], layer: Part) -> float:
        mine, whole, parts = self._owners[rank], 0.0, []
        microbatches = self.table.num_microbatches + self.later
        for s, count in zip(mine, more, strict=True):
            part = self._fixed[s]
            forward, input_s = (
                part.forward + count * layer.forward,
                part.input + count * layer.input,
            )
            work, exchange = part.work + count * layer.work, part.exchange + count * layer.exchange
            whole += microbatches * work - self.later * self.overlap * exchange
            parts.append((forward, input_s, self.overlap * exchange / (forward + input_s or 1.0)))
        # Layers pair one to one, which tells something if all of them are alike.
        is_exact = len(mine) <= 2 and all(self._kinds[s] == {layer} for s in mine)
        for (one, two), count in self.uses[rank].pairs.items():
            (f, _, of_f), (b, input_s, of_b) = parts[one], parts[two]
            shorter = min(f, b) if is_exact else math.inf
            whole -= count * of_f * min(f, shorter)
            whole -= count * of_b * input_s * min(1.0, shorter / (b or math.inf))
        return whole

    def _memory(self, rank: int, layer: Part) -> list[list[float]]:
        """Return the bytes at each moment, and for each stage those that one layer more adds."""
        own = [self._fixed[s] for s in self._owners[rank]]
        static = max(part.transient for part in own) + sum(map(self.static, own))

        def kept(part: Part, at: tuple[int, int]) -> float:
            return at[0] * part.saved + at[1] * part.waiting

        moments = self.uses[rank].moments
        return [
            [static + sum(map(kept, own, moment)) for moment in moments],
            *([self.static(layer) + kept(layer, each) for each in of_stage]
              for of_stage in zip(*moments, strict=True)),
        ]  # fmt: skip
