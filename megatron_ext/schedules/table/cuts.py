"""Cuts a model's layers into a placement's stages and balances the work across ranks.

A cut is a number of layers per stage, or a layout in Megatron's notation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement


def cut(
    layers: Sequence[float],
    first: float,
    last: float,
    placement: Placement,
    *,
    least_first: int = 1,
    least_last: int = 1,
    by_stage: bool = False,
) -> list[int]:
    """Return the number of layers per stage that minimizes the work on the busiest rank.

    If every rank has one stage, the result is exact: dynamic programming over (stage, end)
    minimizes the longest stage, then the sum of squares. If ranks have more than one stage, that
    cut is only the starting point: unless `by_stage` is set, single layers then move from the
    busiest rank to other ranks as long as this helps. The schedule determines whether even ranks or
    even stages are faster.

    Args:
        layers: Work in every transformer layer, in any unit.
        first: Work in the first stage besides its layers: the embedding.
        last: Work in the last stage besides its layers: MTP and the loss.
        placement: The stages' placement.
        least_first: Minimum number of layers in the first stage.
        least_last: Minimum number of layers in the last stage. All other stages need at least one
            layer.
        by_stage: Whether to minimize the longest stage instead of the work on the busiest rank.

    Raises:
        ScheduleError: There are too few layers.
    """
    counts = _by_longest_stage(
        layers,
        first,
        last,
        placement.num_stages,
        least_first=least_first,
        least_last=least_last,
    )
    if placement.num_stages > placement.num_ranks and not by_stage:
        _move(
            counts,
            layers,
            first,
            last,
            placement,
            least_first=least_first,
            least_last=least_last,
        )
    return counts


_Work = tuple[float, float]
"""(work in the longest stage, sum of squares over all stages). Smaller is better."""

_NEVER: _Work = (float("inf"), 0.0)


def _by_longest_stage(
    layers: Sequence[float],
    first: float,
    last: float,
    num_stages: int,
    *,
    least_first: int,
    least_last: int,
) -> list[int]:
    """Return the layers per stage that minimize the longest stage, then the sum of squares.

    Raises:
        ScheduleError: There are too few layers.
    """
    count = len(layers)
    work_before = [0.0, *accumulate(layers)]
    # All layers fit if every stage in turn is filled up to this much work. No stage in
    # the best cut therefore needs more, and the search can skip longer stages. The
    # factor absorbs rounding errors.
    mean_work = (work_before[-1] + first + last) / num_stages
    enough = max(mean_work, first, last) + max(layers)
    enough *= 1 + 1e-9
    # By end layer: the work in the best cut of all stages so far.
    best: list[_Work] = [_NEVER] * (count + 1)
    best[0] = (0.0, 0.0)
    # By stage and end layer: the stage's first layer in that cut.
    starts: list[list[int]] = []
    for stage in range(num_stages):
        min_layers = 1
        extra = 0.0
        if stage == 0:
            min_layers = least_first
            extra += first
        if stage == num_stages - 1:
            min_layers = least_last
            extra += last
        # Leave enough layers for earlier and later stages.
        layers_before = least_first + stage - 1 if stage else 0
        layers_behind = max(0, num_stages - stage - 2 + least_last)
        first_end = layers_before + min_layers
        last_end = count - layers_behind
        ends: Sequence[int] = range(first_end, last_end + 1)
        if stage == num_stages - 1:
            ends = (count,)
        stage_best = [_NEVER] * (count + 1)
        stage_starts = [0] * (count + 1)
        for end in ends:
            last_start = end - min_layers
            for start in range(last_start, layers_before - 1, -1):
                work = work_before[end] - work_before[start] + extra
                if work > min(enough, stage_best[end][0]):
                    break  # an earlier start only adds work
                longest, squares = best[start]
                total = (max(longest, work), squares + work * work)
                if total < stage_best[end]:
                    stage_best[end] = total
                    stage_starts[end] = start
        best = stage_best
        starts.append(stage_starts)
    if best[count] == _NEVER:
        raise ScheduleError(f"{count} layers are too few for {num_stages} stages")
    counts = []
    # Starting from the last layer, trace back the best cut's stage boundaries.
    end = count
    for stage_starts in reversed(starts):
        counts.append(end - stage_starts[end])
        end = stage_starts[end]
    counts.reverse()
    return counts


def loads(
    counts: Sequence[int],
    layers: Sequence[float],
    first: float,
    last: float,
    placement: Placement,
) -> list[float]:
    """Return the work by rank for a given cut, in the unit of `layers`."""
    rank_work = [0.0] * placement.num_ranks
    start = 0
    for stage, count in enumerate(counts):
        rank = placement.rank_of[stage]
        stage_layers = layers[start : start + count]
        rank_work[rank] += sum(stage_layers)
        start += count
    rank_work[placement.rank_of[0]] += first
    rank_work[placement.rank_of[-1]] += last
    return rank_work


def _move(
    counts: list[int],
    layers: Sequence[float],
    first: float,
    last: float,
    placement: Placement,
    *,
    least_first: int,
    least_last: int,
) -> None:
    """Move single layers off the busiest rank while that lowers its load or the sum of squares."""

    def value() -> tuple[float, float, int]:
        """Return the tuple that a move must lower: highest load, sum of squares, most layers."""
        rank_work = loads(counts, layers, first, last, placement)
        # Round, because summing in a different order could otherwise look like an
        # improvement.
        highest_load = round(max(rank_work), 12)
        squares = sum(work * work for work in rank_work)
        return highest_load, round(squares, 12), max(counts)

    last_stage = len(counts) - 1
    least_of = {0: least_first, last_stage: least_last}
    reached = value()
    # Every move lowers the value, so the search always terminates. The limit bounds the
    # search time.
    for _ in range(4 * len(layers)):
        rank_work = loads(counts, layers, first, last, placement)
        busiest = max(range(len(rank_work)), key=rank_work.__getitem__)
        # The best move: (value, stage that gives a layer, stage that takes it).
        best = (reached, 0, 0)
        # Try to move one layer from every stage on the busiest rank to every other
        # stage.
        for giver in placement.stages_of[busiest]:
            if counts[giver] <= least_of.get(giver, 1):
                continue
            counts[giver] -= 1
            for taker in range(len(counts)):
                counts[taker] += 1
                move = (value(), giver, taker)
                best = min(best, move)
                counts[taker] -= 1
            counts[giver] += 1
        best_value, giver, taker = best
        if best_value >= reached:
            return
        reached = best_value
        counts[giver] -= 1
        counts[taker] += 1


def spread(
    num_layers: int,
    num_stages: int,
    first: float = 0,
    last: float = 0,
    rank_of: Sequence[int] | None = None,
) -> list[int]:
    """Return the number of layers per stage that gives all stages about the same work.

    All layers are assumed to be the same. Use `cut` if the work differs between layers.

    Args:
        num_layers: Number of layers in the model.
        num_stages: Number of stages.
        first: Work in the first stage besides its layers, in units of a layer.
        last: Work in the last stage besides its layers, in units of a layer.
        rank_of: By stage: its rank. If None, every stage is on a separate rank.
    """
    rank_of = rank_of or range(num_stages)
    stage_work = [0.0] * num_stages
    stage_work[0] += first
    stage_work[-1] += last
    rank_work = [0.0] * (max(rank_of) + 1)
    for stage, work in enumerate(stage_work):
        rank_work[rank_of[stage]] += work

    def preference(stage: int) -> tuple[float, float, int]:
        # Among equal stages, prefer the rank with the least work. Otherwise, all
        # remaining layers would end up on the middle ranks, which hold two such stages
        # each in a V. Among equal ranks, prefer those in the middle, because those at
        # the ends compute the embedding and the loss as well.
        off_centre = abs(2 * stage - num_stages + 1)
        return stage_work[stage], rank_work[rank_of[stage]], off_centre

    counts = [0] * num_stages
    for _ in range(num_layers):
        stage = min(range(num_stages), key=preference)
        stage_work[stage] += 1
        rank_work[rank_of[stage]] += 1
        counts[stage] += 1
    return counts


def layout_of(counts: Sequence[int], mtp_layers: int) -> str:
    """Return the layout in the notation of `--pipeline-model-parallel-layout`."""
    layers = "|".join("t" * count for count in counts)
    mtp = "m" * mtp_layers
    return f"E{layers}{mtp}L"


def parse_layout(text: str) -> list[str]:
    """Return every stage's layers, one letter per layer, from a layout in Megatron's notation.

    `(...)*n` and `x*n` are repetitions. Commas are ignored.

    Raises:
        ScheduleError: A letter does not represent a layer.
    """

    def repeated(match: re.Match[str]) -> str:
        layers = match[1]
        return layers * int(match[2])

    unrolled = text.replace(",", "")
    # Expand groups first, then single letters.
    for repetition in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(repetition, repeated, unrolled)
    unknown = set(unrolled) - set("EtmL|")
    if unknown:
        raise ScheduleError(
            f"--pipeline-model-parallel-layout {text} contains {' and '.join(sorted(unknown))}, "
            "but layers are E, t, m and L; use only these letters"
        )
    return unrolled.split("|")
