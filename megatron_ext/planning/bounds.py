"""Computes a lower bound on a table's time over all cuts of the layers that fit in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.planning.layer_costs import Part, beside, total

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Row, Schedule

_ROUNDING = 1e-9
"""Slack, in layers, so that rounding errors do not exclude a division of layers that fits."""
_FORWARD_CHANGE = {"F": 1, "W": 0}
"""Change in the number of live micro-batches on a stage, by action; -1 for actions not listed."""
_WAITING_CHANGE = {"I": 1, "W": -1}
"""Change in the number of weight gradients waiting on a stage, by action."""


class StageLoad(NamedTuple):
    """A stage's load at a given moment."""

    live: int
    """Number of micro-batches between their forward and backward passes."""
    waiting: int
    """Number of weight gradients between I and W."""


class RowUse(NamedTuple):
    """Summary of a rank's row. Stages are identified by their position among the rank's stages."""

    fullest_moments: list[list[StageLoad]]
    """The stages' loads at every moment that no other moment exceeds. For ranks with more than two
    stages, only the two fullest moments are kept."""
    num_pairs: Counter[tuple[int, int]]
    """(position of the forward stage, position of the backward stage) -> number of pairs."""


# For each stage in turn, the live micro-batches and the waiting weight gradients. The
# tuple is flat because moments are compared number by number.
_Moment = tuple[int, ...]


def uses_of(table: Schedule) -> list[RowUse]:
    """Return a summary of every rank's row."""
    uses = []
    for rank, row in enumerate(table.rows):
        stages = table.placement.stages_of[rank]
        position_of: dict[int, int] = {}
        for position, stage in enumerate(stages):
            position_of[stage] = position
        moments = _moments(row, position_of)
        # The number of moments to keep grows rapidly with the number of stages, and
        # every moment is tried with every division of the layers.
        if len(stages) <= 2:
            fullest = _unexceeded(moments)
        else:
            fullest = _two_fullest(moments)
        num_pairs: Counter[tuple[int, int]] = Counter()
        for index in table.pairs_of(rank):
            forward = row[index]
            backward = row[index + 1]
            positions = (position_of[forward.stage], position_of[backward.stage])
            num_pairs[positions] += 1
        loads = [_stage_loads(moment) for moment in fullest]
        uses.append(RowUse(loads, num_pairs))
    return uses


def _stage_loads(moment: _Moment) -> list[StageLoad]:
    live_by_stage = moment[::2]
    waiting_by_stage = moment[1::2]
    loads = zip(live_by_stage, waiting_by_stage, strict=True)
    return [StageLoad(*load) for load in loads]


def _moments(row: Row, position_of: Mapping[int, int]) -> set[_Moment]:
    """Return the distinct loads that a rank has after each action in its row."""
    moments = set()
    # For each stage in turn, the live micro-batches and the waiting weight gradients.
    loads = [0] * 2 * len(position_of)
    for stage, kind, *_ in row:
        live_index = 2 * position_of[stage]
        loads[live_index] += _FORWARD_CHANGE.get(kind, -1)
        loads[live_index + 1] += _WAITING_CHANGE.get(kind, 0)
        moments.add(tuple(loads))
    return moments


def _unexceeded(moments: set[_Moment]) -> set[_Moment]:
    """Return the moments that no other moment exceeds in every number."""
    unexceeded: set[_Moment] = set()
    # The sums are in descending order, so no moment can exceed an earlier one.
    fullest_first = sorted(moments, key=sum, reverse=True)
    for moment in fullest_first:
        if not any(_exceeds(fuller, moment) for fuller in unexceeded):
            unexceeded.add(moment)
    return unexceeded


def _exceeds(fuller: _Moment, moment: _Moment) -> bool:
    """Return whether every stage keeps at least as much at `fuller` as at `moment`."""
    loads = zip(moment, fuller, strict=True)
    return all(load <= fuller_load for load, fuller_load in loads)


def _two_fullest(moments: set[_Moment]) -> set[_Moment]:
    """Return the moment with the largest sum and the one with the largest minimum over stages."""

    def least_and_sum(moment: _Moment) -> tuple[int, int]:
        live_by_stage = moment[::2]
        return min(live_by_stage), sum(moment)

    fullest = max(moments, key=sum)
    fullest_at_all_stages = max(moments, key=least_and_sum)
    return {fullest, fullest_at_all_stages}


class _Candidate(NamedTuple):
    """A rank that may get one more layer. Sorting puts the one that finishes first in front."""

    end_s: float
    """The time at which the rank would finish with this layer."""
    rank: int
    num_extra: int
    """The rank's number of extra layers, including this one."""


@dataclass(frozen=True, kw_only=True)
class CutBound:
    """Bounds a table's time over all cuts.

    A rank's row starts after the forward passes on all stages before its first action's stage and
    ends before the backward passes on all stages before its last action's stage. By a given time, a
    rank can therefore finish only so many layers, and only so many fit in its memory. The bound is
    the time by which the ranks can finish all layers of every kind. For a rank with one or two
    stages, all divisions of its layers among the stages are tried. More than two stages are treated
    as a single stage in which every layer costs as little as on the cheapest of them.
    """

    table: Schedule
    uses: Sequence[RowUse]
    layers: Sequence[Part]
    first: Part
    """The first stage's extra part."""
    last: Part
    """The last stage's extra part."""
    min_layers: Sequence[int]
    """Minimum number of layers in each stage. Their sum must not exceed the model's number of
    layers."""
    overlap: float
    """Maximum share of the exchange that pairs can hide."""
    microbatches_beyond: float
    """Number of micro-batches that a row runs in addition to those in the table."""
    memory_bytes: float
    """Memory that a rank may use."""
    static_bytes: Callable[[Part], float]
    """Returns the size of a part's weights, gradients and optimizer states."""

    def span_s(self) -> float:
        """Return a lower bound on the table's time with any cut; infinite if no cut fits."""
        span_s = 0.0
        outside_s = [self._outside_s(row) for row in self.table.rows]
        stages_of = self.table.placement.stages_of
        # Bound the time for each layer kind separately and return the highest bound.
        for layer, num_layers in Counter(self.layers).items():
            ladders = [_Ladder(self, rank, layer) for rank in range(len(outside_s))]
            # Layers that a stage has in every cut are already in `fixed`.
            num_left = num_layers
            # One candidate per rank, for a layer of this kind.
            candidates: list[_Candidate] = []
            for rank, ladder in enumerate(ladders):
                end_without_extra_s = outside_s[rank] + ladder.least_s(0)
                span_s = max(span_s, end_without_extra_s)
                for stage in stages_of[rank]:
                    if layer in self.kinds[stage]:
                        num_left -= self.min_layers[stage]
                end_s = outside_s[rank] + ladder.least_s(1)
                candidates.append(_Candidate(end_s, rank, 1))
            heapify(candidates)
            # Assign each layer to the rank that would finish it first. No other
            # assignment finishes earlier.
            for _ in range(num_left):
                end_s, rank, num_extra = candidates[0]
                span_s = max(span_s, end_s)
                if span_s == math.inf:
                    return span_s
                num_extra += 1
                end_s = outside_s[rank] + ladders[rank].least_s(num_extra)
                heapreplace(candidates, _Candidate(end_s, rank, num_extra))
        return span_s

    @cached_property
    def kinds(self) -> list[set[Part]]:
        """By stage: the layer kinds that appear on it in some cut."""
        # At the earliest, a stage starts where all earlier stages have their minimum.
        # At the latest, it starts after all spare layers as well.
        num_spare = len(self.layers) - sum(self.min_layers)
        kinds = []
        begin = 0
        for min_layers in self.min_layers:
            end = begin + min_layers
            possible_layers = self.layers[begin : end + num_spare]
            kinds.append(set(possible_layers))
            begin = end
        return kinds

    @cached_property
    def fixed(self) -> list[Part]:
        """By stage: the minimum work and memory over all cuts."""
        fixed = []
        for stage, kinds in enumerate(self.kinds):
            parts: list[Part] = []
            if stage == 0:
                parts.append(self.first)
            if stage == len(self.min_layers) - 1:
                parts.append(self.last)
            if self.min_layers[stage]:
                parts.append(self._cheapest(kinds))
            fixed.append(total(parts))
        return fixed

    def _cheapest(self, kinds: set[Part]) -> Part:
        """Return a part that costs no more than a layer of any of these kinds."""
        if len(kinds) == 1:
            [layer] = kinds
            return layer
        layers_beside = [beside(layer, self.overlap) for layer in kinds]
        # The fastest passes and the smallest sizes may come from different layer kinds.
        fastest = min(layers_beside, key=lambda part: part.work)
        sizes_of_kinds = zip(*kinds, strict=True)
        smallest = Part._make(map(min, sizes_of_kinds))
        return smallest._replace(
            forward=fastest.forward,
            input=fastest.input,
            weight=fastest.weight,
            exchange=0.0,  # `beside` has already removed all that can be hidden
        )

    @cached_property
    def _forwards_before_s(self) -> list[float]:
        """By stage: the seconds of the forward passes on all earlier stages."""
        forwards_s = [part.forward for part in self.fixed]
        return [0.0, *accumulate(forwards_s)]

    @cached_property
    def _backwards_before_s(self) -> dict[str, list[float]]:
        """By the last action's kind and by stage: seconds of backward passes on earlier stages."""
        hidden = [beside(part, self.overlap) for part in self.fixed]
        whole_backwards_s = [part.input + part.weight for part in hidden]
        inputs_s = [part.input for part in hidden]
        return {
            "B": [0.0, *accumulate(whole_backwards_s)],
            "I": [0.0, *accumulate(inputs_s)],
            # No other stage needs a weight gradient, so nothing has to follow W.
            "W": [0.0] * (len(hidden) + 1),
        }

    def _outside_s(self, row: Row) -> float:
        """Return the seconds before a row's first action and after its last one."""
        first_stage = row[0].stage
        last_stage, last_kind, *_ = row[-1]
        return (
            self._forwards_before_s[first_stage]
            + self._backwards_before_s[last_kind][last_stage]
        )

    @cached_property
    def fixed_bytes(self) -> list[float]:
        """By stage: the minimum bytes of weights, gradients and optimizer states over all cuts."""
        return [self.static_bytes(part) for part in self.fixed]


class _FreeMemory(NamedTuple):
    """A rank's free memory at one moment in its row."""

    free_bytes: float
    """Memory that the fixed parts of the rank's stages do not use."""
    bytes_per_layer: list[float]
    """By stage: bytes per additional layer."""


class _Passes(NamedTuple):
    """The duration of a stage's passes in pairs, for some number of layers."""

    forward_s: float
    input_s: float
    hidden_share: float
    """Share of both passes that a partner can hide."""


class _Ladder:
    """A rank's minimum time by the number of extra layers, all of one kind, on its stages."""

    def __init__(self, cut: CutBound, rank: int, layer: Part) -> None:
        stages = cut.table.placement.stages_of[rank]
        use = cut.uses[rank]
        self._cut = cut
        self._layer = layer
        self._stages = stages
        self._num_pairs = use.num_pairs
        parts = [cut.fixed[stage] for stage in stages]
        # A rank needs at least as much temporary memory as its most demanding stage.
        transient_bytes = max(part.transient for part in parts)
        free_bytes = cut.memory_bytes - transient_bytes
        free_bytes -= sum(cut.fixed_bytes[stage] for stage in stages)
        layer_bytes = cut.static_bytes(layer)
        self._free_memory: list[_FreeMemory] = []
        for loads in use.fullest_moments:
            moment_bytes = free_bytes
            bytes_per_layer = []
            for part, load in zip(parts, loads, strict=True):
                fixed_kept_bytes = load.live * part.saved + load.waiting * part.waiting
                moment_bytes -= fixed_kept_bytes
                extra_bytes = layer_bytes + load.live * layer.saved
                extra_bytes += load.waiting * layer.waiting
                bytes_per_layer.append(extra_bytes)
            self._free_memory.append(_FreeMemory(moment_bytes, bytes_per_layer))
        # Layers pair one to one, which determines a pair's duration only if all layers
        # are of the same kind.
        is_alike = len(stages) <= 2 and all(
            cut.kinds[stage] == {layer} for stage in stages
        )
        self._counts_pairs = is_alike and bool(self._num_pairs)
        # Indexed by stage and number of extra layers, and extended on demand.
        self._row_s: list[list[float]] = [[] for _ in stages]
        self._passes: list[list[_Passes]] = [[] for _ in stages]

    def least_s(self, num_extra: int) -> float:
        """Return a row's minimum time in seconds with this many extra layers.

        The result is infinite if no division fits.
        """
        while len(self._row_s[0]) <= num_extra:
            self._add_layer()
        if len(self._stages) == 2:
            return self._least_of_two_s(num_extra)
        for moment in self._free_memory:
            # Whichever stages the extra layers are in, they need at least this much
            # memory.
            if num_extra * min(moment.bytes_per_layer) > moment.free_bytes:
                return math.inf
        # With more than two stages, assume that every extra layer goes where it costs
        # the least.
        least_s = sum(row_s[0] for row_s in self._row_s)
        extra_s = [row_s[num_extra] - row_s[0] for row_s in self._row_s]
        least_s += min(extra_s)
        if self._counts_pairs:
            least_s -= self._hidden_s([num_extra])
        return least_s

    def _least_of_two_s(self, num_extra: int) -> float:
        """Return the minimum time over all divisions of the extra layers between two stages."""
        first_s, second_s = self._row_s
        fewest_on_first = 0
        most_on_first = num_extra
        for moment in self._free_memory:
            bytes_on_first, bytes_on_second = moment.bytes_per_layer
            # Start with all extra layers on the second stage. Moving a layer to the
            # first stage frees `bytes_on_second` and needs `bytes_on_first`.
            free_bytes = moment.free_bytes - num_extra * bytes_on_second
            moved_bytes = bytes_on_first - bytes_on_second
            if moved_bytes > 0:
                max_kept = math.floor(free_bytes / moved_bytes + _ROUNDING)
                most_on_first = min(most_on_first, max_kept)
            elif moved_bytes < 0:
                fewest = math.ceil(free_bytes / moved_bytes - _ROUNDING)
                fewest_on_first = max(fewest_on_first, fewest)
            elif free_bytes < 0:
                return math.inf
        least_s = math.inf
        for on_first in range(fewest_on_first, most_on_first + 1):
            on_second = num_extra - on_first
            row_s = first_s[on_first] + second_s[on_second]
            if self._counts_pairs:
                row_s -= self._hidden_s([on_first, on_second])
            least_s = min(least_s, row_s)
        return least_s

    def _add_layer(self) -> None:
        """Extend the times of all stages by one extra layer."""
        cut = self._cut
        layer = self._layer
        num_extra = len(self._row_s[0])
        num_microbatches = cut.table.num_microbatches + cut.microbatches_beyond
        for position, stage in enumerate(self._stages):
            part = cut.fixed[stage]
            work_s = part.work + num_extra * layer.work
            exchange_s = part.exchange + num_extra * layer.exchange
            exchange_s *= cut.overlap
            forward_s = part.forward + num_extra * layer.forward
            input_s = part.input + num_extra * layer.input
            # A stage without layers may compute nothing.
            computed_s = forward_s + input_s or 1.0
            hidden_share = exchange_s / computed_s
            # Assume that micro-batches beyond the table hide as much of the exchange as
            # pairs can hide.
            row_s = num_microbatches * work_s - cut.microbatches_beyond * exchange_s
            if not self._counts_pairs:
                # Assume that a pair hides as much as it can, however long the partner
                # is.
                for pair_positions, num_pairs in self._num_pairs.items():
                    forward_position, backward_position = pair_positions
                    paired_s = 0.0
                    if forward_position == position:
                        paired_s += forward_s
                    if backward_position == position:
                        paired_s += input_s
                    row_s -= num_pairs * hidden_share * paired_s
            passes = _Passes(forward_s, input_s, hidden_share)
            self._row_s[position].append(row_s)
            self._passes[position].append(passes)

    def _hidden_s(self, num_extra_by_stage: Sequence[int]) -> float:
        """Return how many seconds of all-to-all pairs hide with these numbers of extra layers."""
        passes = []
        for stage_passes, num_extra in zip(
            self._passes, num_extra_by_stage, strict=True
        ):
            passes.append(stage_passes[num_extra])
        hidden_s = 0.0
        for pair_positions, num_pairs in self._num_pairs.items():
            forward_position, backward_position = pair_positions
            forward = passes[forward_position]
            backward = passes[backward_position]
            # Layers pair one to one, so the larger stage's surplus layers run alone.
            paired_s = min(forward.forward_s, backward.forward_s)
            hidden_s += num_pairs * forward.hidden_share * paired_s
            backward_stage_s = backward.forward_s or math.inf
            paired_share = min(1.0, paired_s / backward_stage_s)
            hidden_s += (
                num_pairs * backward.hidden_share * backward.input_s * paired_share
            )
        return hidden_s
