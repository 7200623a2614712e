"""Lower bound on the time of a schedule's table for any cut of the layers that fits into memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
            most = set()
            for one in sorted(moments, key=sum, reverse=True):  # none exceeds one before it
                if not any(all(map(le, one, two)) for two in most):
                    most.add(one)
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
    """Layers that each stage needs; together no more than there are."""
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
        span, waits = 0.0, list(map(self._waits, self.table.rows))
        owners = self.table.placement.stages_of
        for layer, count in Counter(self.layers).items():
            left, heap = count, []
            ladders = [_Ladder(self, rank, layer) for rank in range(len(waits))]
            for rank, wait in enumerate(waits):
                span = max(span, wait + ladders[rank].least_s(0))
                left -= sum(self.least[s] for s in owners[rank] if layer in self.kinds[s])
                heap.append((wait + ladders[rank].least_s(1), rank, 1))
            heapify(heap)
            for _ in range(left):
                now, rank, more = heap[0]
                span = max(span, now)
                if span == math.inf:
                    return span
                then = waits[rank] + ladders[rank].least_s(more + 1)
                heapreplace(heap, (then, rank, more + 1))
        return span

    @cached_property
    def kinds(self) -> list[set[Part]]:
        """The layers that a stage may have, whatever the cut."""
        starts, spare = [0, *accumulate(self.least)], len(self.layers) - sum(self.least)
        return [set(self.layers[begin : end + spare]) for begin, end in pairwise(starts)]

    @cached_property
    def fixed(self) -> list[Part]:
        """The least that each stage computes and keeps, whatever the cut."""
        found = []
        for s, kinds in enumerate(self.kinds):
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

    @cached_property
    def _ends(self) -> tuple[list[float], dict[str, list[float]]]:
        """The forwards of the stages before each, and by kind of action their backwards."""
        after = [beside(part, self.overlap) for part in self.fixed]
        kinds = {
            "B": [part.input + part.weight for part in after],
            "I": [part.input for part in after],
            "W": [0.0] * len(after),
        }
        forwards = [0.0, *accumulate(part.forward for part in self.fixed)]
        return forwards, {kind: [0.0, *accumulate(each)] for kind, each in kinds.items()}

    def _waits(self, row: Sequence[tuple[int, str, int, int]]) -> float:
        """Return the seconds before the first action of a row and after its last."""
        forwards, backwards = self._ends
        end, kind, *_ = row[-1]
        return forwards[row[0][0]] + backwards[kind][end]

    @cached_property
    def statics(self) -> list[float]:
        """Bytes of weights, gradients and optimizer that each stage has, whatever the cut."""
        return list(map(self.static, self.fixed))


class _Ladder:
    """The least that a rank runs by how many more layers of a kind its stages have."""

    def __init__(self, cut: CutBound, rank: int, layer: Part) -> None:
        self._cut, self._layer = cut, layer
        self._mine = mine = cut.table.placement.stages_of[rank]
        self._pairs, static = cut.uses[rank].pairs, cut.static(layer)
        parts = [cut.fixed[s] for s in mine]
        room = cut.limit - max(part.transient for part in parts) - sum(cut.statics[s] for s in mine)
        # The bytes left at each moment, and of them what one layer more takes, by stage.
        self._moments: list[tuple[float, list[float]]] = []
        for moment in cut.uses[rank].moments:
            left, more = room, []
            for part, (alive, waiting) in zip(parts, moment, strict=True):
                left -= alive * part.saved + waiting * part.waiting
                more.append(static + alive * layer.saved + waiting * layer.waiting)
            self._moments.append((left, more))
        # Layers pair one to one, which tells something if all of them are alike.
        is_alike = len(mine) <= 2 and all(cut.kinds[s] == {layer} for s in mine)
        self._is_exact = is_alike and bool(self._pairs)
        # By stage and layers: the whole without that; forward, input gradient and hidden share.
        self._wholes: list[list[float]] = [[] for _ in mine]
        self._passes: list[list[tuple[float, float, float]]] = [[] for _ in mine]

    def least_s(self, count: int) -> float:
        """Return the seconds of the best way to share out so many layers; infinite if none fits."""
        while len(self._wholes[0]) <= count:
            self._add_layer()
        if len(self._mine) != 2:
            if any(count * min(more) > room for room, more in self._moments):
                return math.inf
            least = sum(whole[0] for whole in self._wholes)
            least += min(whole[count] - whole[0] for whole in self._wholes)
            return least - self._hidden_s(count) if self._is_exact else least
        one, two = self._wholes
        fewest, most = 0, count  # of the first stage
        for room, (more, other) in self._moments:
            left, change = room - count * other, more - other
            # Rounding must not rule out a way that fits: the bound would not be one.
            if change > 0:
                most = min(most, math.floor(left / change + 1e-9))
            elif change < 0:
                fewest = max(fewest, math.ceil(left / change - 1e-9))
            elif left < 0:
                return math.inf
        ways: Iterable[float] = (one[n] + two[count - n] for n in range(fewest, most + 1))
        if self._is_exact:
            ways = (
                whole - self._hidden_s(n, count - n) for n, whole in enumerate(ways, start=fewest)
            )
        return min(ways, default=math.inf)

    def _add_layer(self) -> None:
        cut, layer, count = self._cut, self._layer, len(self._wholes[0])
        for at, s in enumerate(self._mine):
            part = cut.fixed[s]
            work = part.work + count * layer.work
            exchange = cut.overlap * (part.exchange + count * layer.exchange)
            forward = part.forward + count * layer.forward
            input_s = part.input + count * layer.input
            share = exchange / (forward + input_s or 1.0)
            whole = (cut.table.num_microbatches + cut.later) * work - cut.later * exchange
            if not self._is_exact:
                for (one, two), number in self._pairs.items():
                    whole -= number * share * (forward * (one == at) + input_s * (two == at))
            self._wholes[at].append(whole)
            self._passes[at].append((forward, input_s, share))

    def _hidden_s(self, *counts: int) -> float:
        found, parts = 0.0, [passes[n] for passes, n in zip(self._passes, counts, strict=True)]
        for (one, two), number in self._pairs.items():
            (f, _, of_f), (b, input_s, of_b) = parts[one], parts[two]
            found += number * of_f * min(f, b)
            found += number * of_b * input_s * min(1.0, min(f, b) / (b or math.inf))
        return found
