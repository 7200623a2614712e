"""Cuts the layers of a model into the stages of a placement, so that no rank works longest.

A cut is a number of layers for each stage, or a layout in Megatron's notation.
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
    """Return the number of layers of each stage that makes the longest work of a rank shortest.

    Exact where each rank has one stage: dynamic programming over (stage, end), by longest stage,
    then by the sum of squares. Where a rank has several, that is the start, and single layers then
    move from the busiest rank to any other while this helps, unless stages are to be even. Whether
    even ranks or even stages are faster depends on the schedule.

    Args:
        layers: Work of each transformer layer, in any unit.
        first: Work of the first stage besides its layers: the embedding.
        last: Work of the last stage besides its layers: MTP and loss.
        placement: The rank of each stage.
        least_first: Layers that the first stage needs.
        least_last: Those that the last stage needs; every other needs one.
        by_stage: Make the longest stage shortest, not the busiest rank.

    Raises:
        ScheduleError: There are too few layers.
    """
    stages, count = placement.num_stages, len(layers)
    upto = [0.0, *accumulate(layers)]
    never = (float("inf"), 0.0)
    # Filling each stage up to this, one after the other, reaches the end; sums may round up.
    enough = (max((upto[-1] + first + last) / stages, first, last) + max(layers)) * (1 + 1e-9)
    best = [(0.0, 0.0), *[never] * count]
    starts: list[list[int]] = []
    for stage in range(stages):
        least = least_last if stage == stages - 1 else least_first if stage == 0 else 1
        extra = first * (stage == 0) + last * (stage == stages - 1)
        found, froms = [never] * (count + 1), [0] * (count + 1)
        left = max(0, stages - stage - 2 + least_last)  # layers that later stages need
        before = least_first + stage - 1 if stage else 0  # layers that earlier stages need
        for end in range(before + least, count - left + 1) if stage < stages - 1 else (count,):
            for start in range(end - least, before - 1, -1):
                work = upto[end] - upto[start] + extra
                if work > min(enough, found[end][0]):
                    break  # an earlier start only makes it longer
                total = (max(best[start][0], work), best[start][1] + work * work)
                if total < found[end]:
                    found[end], froms[end] = total, start
        best = found
        starts.append(froms)
    if best[count] == never:
        raise ScheduleError(f"{count} layers do not divide into {stages} stages")
    counts, end = [], count
    for froms in reversed(starts):
        counts.append(end - froms[end])
        end = froms[end]
    counts.reverse()
    if stages > placement.num_ranks and not by_stage:
        _move(counts, layers, first, last, placement, (least_first, least_last))
    return counts


def loads(
    counts: Sequence[int], layers: Sequence[float], first: float, last: float, placement: Placement
) -> list[float]:
    """Return the work of each rank under a cut, in the unit of the layers."""
    found, start = [0.0] * placement.num_ranks, 0
    for stage, count in enumerate(counts):
        found[placement.rank_of[stage]] += sum(layers[start : start + count])
        start += count
    found[placement.rank_of[0]] += first
    found[placement.rank_of[-1]] += last
    return found


def _move(
    counts: list[int],
    layers: Sequence[float],
    first: float,
    last: float,
    placement: Placement,
    least_ends: tuple[int, int],
) -> None:
    """Move single layers from the busiest rank while its load, then the sum of squares, falls."""

    def value() -> tuple[float, float, int]:
        now = loads(counts, layers, first, last, placement)
        return round(max(now), 12), round(sum(load * load for load in now), 12), max(counts)

    reached = value()
    for _ in range(4 * len(layers)):
        now = loads(counts, layers, first, last, placement)
        better = None
        busiest = max(range(len(now)), key=now.__getitem__)
        for giver in placement.stages_of[busiest]:
            ends = {0: least_ends[0], len(counts) - 1: least_ends[1]}
            if counts[giver] <= ends.get(giver, 1):
                continue
            counts[giver] -= 1
            for taker in range(len(counts)):
                counts[taker] += 1
                better = min(better or (reached, 0, 0), (value(), giver, taker))
                counts[taker] -= 1
            counts[giver] += 1
        if better is None or better[0] >= reached:
            return
        reached, giver, taker = better
        counts[giver] -= 1
        counts[taker] += 1


def spread(
    num_layers: int,
    num_stages: int,
    first: float = 0,
    last: float = 0,
    rank_of: Sequence[int] | None = None,
) -> list[int]:
    """Return the layers of each stage, so that all stages compute about the same.

    For layers of which nothing is known but that they are alike: `cut` has the work of each.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages.
        first: What the first stage computes besides its layers, in layers.
        last: The same of the last stage.
        rank_of: The rank of each stage; None: one for each.
    """
    loads = [0.0] * num_stages
    loads[0] += first
    loads[-1] += last
    counts, rank_of = [0] * num_stages, rank_of or range(num_stages)
    of_rank = [0.0] * (max(rank_of) + 1)
    for stage, load in enumerate(loads):
        of_rank[rank_of[stage]] += load
    for _ in range(num_layers):
        # Of equal stages one of the rank with the least, or what does not divide ends up on the
        # ranks of the middle: in a V they hold two stages each of it. Of equal ranks the middle
        # ones: the ends also compute embedding and loss.
        least = min(
            range(num_stages),
            key=lambda s: (loads[s], of_rank[rank_of[s]], abs(2 * s - num_stages + 1)),
        )
        loads[least] += 1
        of_rank[rank_of[least]] += 1
        counts[least] += 1
    return counts


def layout_of(counts: Sequence[int], mtp_layers: int) -> str:
    """Return the stages in the notation of `--pipeline-model-parallel-layout`."""
    return "E" + "|".join("t" * count for count in counts) + "m" * mtp_layers + "L"


def parse_layout(text: str) -> list[str]:
    """Return the layers of each stage, a letter each, of a layout in Megatron's notation.

    `(...)*n` and `x*n` are repetitions; commas only structure the text.

    Raises:
        ScheduleError: A letter is no layer.
    """
    unrolled = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(repeated, lambda match: match[1] * int(match[2]), unrolled)
    unknown = set(unrolled) - set("EtmL|")
    if unknown:
        raise ScheduleError(
            f"--pipeline-model-parallel-layout {text} has {' and '.join(sorted(unknown))}, but "
            "layers are E, t, m and L; use these"
        )
    return unrolled.split("|")
