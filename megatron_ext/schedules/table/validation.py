"""Proves that a table is a correct schedule, or shows where it is wrong.

Every registered schedule, every loaded CSV and every start-up goes through `validate`. It takes
milliseconds (about 1 us per action) and proves more than any run could: a table that passes
computes each gradient exactly once, ends on every rank with any timing, and stays below the memory
cap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Kind, Schedule
from megatron_ext.schedules.table.communication import check_slots, reduction_order
from megatron_ext.schedules.table.memory import (
    Edge,
    Memory,
    live_counts,
    measure,
    slots_needed,
)
from megatron_ext.schedules.table.transforms import literal_rows
from megatron_ext.schedules.table.walk import check_ends

# Actions done for one stage and micro-batch, as a bit set.
_BIT = {"F": 1, "R": 1, "B": 2, "I": 4, "W": 8}
# Compared as a whole and not bit by bit: an action that comes twice, and a B beside an I, differ
# from it as much as one that comes too early.
_BEFORE = {"F": 0, "R": 0, "B": 1, "I": 1, "W": 1 | 4}
_COMPLETE = (1 | 2, 1 | 4 | 8)


@dataclass(frozen=True)
class Report:
    """Properties of a correct table."""

    memory: Memory
    slots: Mapping[Edge, int]
    """Receive slots on each edge with which no send ever waits."""
    ascending: bool
    """Whether each stage runs its backwards (and its W) in the order of the micro-batches, and in
    reverse the slices of each. If so, gradients are summed in the same order as without a pipeline,
    and equal bit for bit."""


def validate(
    schedule: Schedule,
    *,
    max_activations: float | None = None,
    max_weight_stash: float | None = None,
    slots: int | None = None,
) -> Report:
    """Check all properties of a table that are known before it runs.

    Args:
        schedule: The table.
        max_activations: Upper bound on the activations of a rank, in Ma (see memory.py).
        max_weight_stash: Upper bound on the weight stash of a rank, in Ma.
        slots: Receive slots on each edge, if sends wait for a free one. None: as many as
            `Report.slots`, so that no send waits.

    Raises:
        ScheduleError: The table is wrong; the message marks the place and states the rule.
    """
    check_actions(schedule)
    check_ends(schedule)
    memory = measure(schedule)
    _check_cap(schedule, memory.activations, max_activations, "activations")
    _check_cap(schedule, memory.weight_stash, max_weight_stash, "weight stash")
    if slots is not None:
        check_slots(schedule, slots)
    return Report(memory, slots_needed(schedule), _is_ascending(schedule))


def check_actions(schedule: Schedule) -> None:
    """Check everything except deadlocks, which a simulation detects.

    Raises:
        ScheduleError: An action is duplicated, missing, too early or on the wrong rank, two actions
            are no pair, or twins reduce in different orders.
    """
    check_cover(schedule)
    for rank in range(len(schedule.rows)):
        _check_pairs(schedule, rank)
    if schedule.placement.twins == 2:
        _check_twins(schedule)


def _check_pairs(schedule: Schedule, rank: int) -> None:
    """Check that pairs are a forward and a backward of two micro-batches.

    The members of an expert group, which meet inside a pair, run the same row: they verify that by
    the digest, which has the pairs.
    """
    row, ends = schedule.rows[rank], 0
    for index in sorted(schedule.pairs_of(rank)):
        both = row[index : index + 2]
        kinds = "".join(action.kind for action in both)
        if kinds not in ("FB", "FI"):
            rule = "a pair is a forward and the backward, or input gradient, behind it"
        elif both[0].microbatch == both[1].microbatch:
            rule = "both are of one micro-batch, whose backward needs the forward first"
        elif schedule.disaggregated:
            rule = "forwards and backwards are on different ranks"
        elif index < ends:
            rule = f"{both[0]} is in two pairs"
        else:
            ends = index + 2
            continue
        names = ";".join(map(str, both))
        raise ScheduleError(f"({names}) is no pair: {rule}\n  {schedule.marked(rank, index)}")


def check_cover(schedule: Schedule) -> None:
    """Check that each rank computes exactly what its stages need: each action once, F first.

    Raises:
        ScheduleError: At the first action that is duplicated, missing, too early or misplaced.
    """
    m, num_ranks = schedule.num_microbatches, schedule.placement.num_ranks
    if len(schedule.rows) != num_ranks:
        raise ScheduleError(
            f"{schedule.label} has {len(schedule.rows)} rows, its {schedule.placement.name} "
            f"placement has {num_ranks} ranks; a table has one row for each rank"
        )
    num_slices = schedule.num_slices
    if num_slices > 1 and schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} runs forwards and backwards on different ranks, which would both "
            "need the keys and values of earlier slices; leave slices out"
        )
    # A byte for each: a set of actions would make the proof of a large table many times as long.
    done = bytearray(schedule.num_stages * schedule.slices_in_step)
    # With two roles, a forward is not a precondition of later actions of the same rank.
    forwards = bytearray(len(done)) if schedule.disaggregated else done
    kinds = _kinds_of_stages(schedule)
    for rank, row in enumerate(schedule.rows):
        mine = kinds[rank]
        for index, (stage, kind, microbatch, part) in enumerate(row):
            is_known = kind in mine.get(stage, "") and 0 <= microbatch < m
            if not (is_known and 0 <= part < num_slices):
                raise ScheduleError(_misplaced(schedule, rank, index))
            key = (stage * m + microbatch) * num_slices + part
            cells = forwards if kind == "F" else done
            if cells[key] != _BEFORE[kind]:
                raise ScheduleError(_unexpected(schedule, rank, index, cells[key]))
            cells[key] |= _BIT[kind]
            if kind == "F" and part and not cells[key - 1]:
                raise ScheduleError(_too_early(schedule, rank, index, -1))
            # Any backward of the later slice has set a higher bit than F.
            if kind in ("B", "I") and part + 1 < num_slices and cells[key + 1] < _BIT["B"]:
                raise ScheduleError(_too_early(schedule, rank, index, 1))
    for key, bits in enumerate(done):
        if bits not in _COMPLETE:
            raise ScheduleError(_missing(schedule, key, bits))
    if schedule.disaggregated:
        _check_forwards(schedule, forwards)


def _check_forwards(schedule: Schedule, forwards: bytearray) -> None:
    for key, ran in enumerate(forwards):
        stage, microbatch = divmod(key, schedule.num_microbatches)
        if not ran and schedule.runs_forward(stage):
            raise ScheduleError(
                f"rank {schedule.placement.rank_of[stage]} never runs {stage}F{microbatch}, which "
                "others need; forward ranks must run F of each micro-batch"
            )


def _too_early(schedule: Schedule, rank: int, index: int, step: int) -> str:
    action = schedule.rows[rank][index]
    before = action._replace(slice=action.slice + step)
    rule = (
        f"{before} has to run before it, because its keys and values are read"
        if step < 0
        else f"{before} has to run before it, because it adds to the gradients of keys and values"
    )
    return f"{action} cannot run here: {rule}\n  {schedule.marked(rank, index)}"


def _kinds_of_stages(schedule: Schedule) -> list[dict[int, str]]:
    """By rank: the kinds of action that it runs, by stage."""
    kinds: list[dict[int, str]] = [{} for _ in schedule.rows]
    for stage in range(schedule.num_stages):
        if not schedule.disaggregated:
            kinds[schedule.placement.rank_of[stage]][stage] = "FBIW"
            continue
        if schedule.runs_forward(stage):
            kinds[schedule.placement.rank_for(stage, "F")][stage] = "F"
        kinds[schedule.placement.rank_for(stage, "B")][stage] = "RBIW"
    return kinds


def _misplaced(schedule: Schedule, rank: int, index: int) -> str:
    action = schedule.rows[rank][index]
    m, stages = schedule.num_microbatches, schedule.placement.stages_of[rank]
    owner = -1
    if not 0 <= action.microbatch < m:
        rule = f"there are {m} micro-batches, 0 to {m - 1}"
    elif not 0 <= action.slice < schedule.num_slices:
        count = schedule.num_slices
        rule = f"micro-batches have {count} slices, 0 to {count - 1}"
    elif action.stage >= schedule.num_stages:
        rule = f"there are {schedule.num_stages} stages, 0 to {schedule.num_stages - 1}"
    else:
        owner = schedule.placement.rank_for(action.stage, action.kind)
        held = ", ".join(map(str, stages)) or "none"
        rule = f"rank {rank} holds the stages {held}; {action} belongs to rank {owner}"
    if owner == rank and action.kind == "R":
        rule = "R is for ranks that run backwards only; this one runs F"
    elif owner == rank:
        rule = f"nobody needs the output of {action}, because backward ranks recompute it"
    return f"{action} does not belong here: {rule}\n  {schedule.marked(rank, index)}"


def _unexpected(schedule: Schedule, rank: int, index: int, bits: int) -> str:
    action = schedule.rows[rank][index]
    if bits & _BIT[action.kind]:
        first = schedule.rows[rank].index(action)
        rule = f"it already ran as action {first}; each action runs exactly once"
    elif not bits & 1:
        opens: Kind = "R" if schedule.disaggregated else "F"
        rule = f"{action._replace(kind=opens)} has to run before it"
    elif action.kind == "W" and not bits & 2:
        rule = f"{action._replace(kind='I')} has to run before it"
    else:
        rule = "a micro-batch has either one B or one I and one W on a stage, not both"
    return f"{action} cannot run here: {rule}\n  {schedule.marked(rank, index)}"


def _missing(schedule: Schedule, key: int, bits: int) -> str:
    number, part = divmod(key, schedule.num_slices)
    stage, microbatch = divmod(number, schedule.num_microbatches)
    forward = Action(stage, "R" if schedule.disaggregated else "F", microbatch, part)
    rank = schedule.placement.rank_for(stage, "B")
    row = schedule.rows[rank]
    if not bits & 1:
        what, last = forward, len(row)
    elif bits & 4:
        what = forward._replace(kind="W")
        last = row.index(forward._replace(kind="I"))
    else:
        what = forward._replace(kind="I" if schedule.splits_backward else "B")
        last = row.index(forward)
    of = f"each of the {schedule.num_microbatches} micro-batches"
    if schedule.num_slices > 1:
        of = f"each of the {schedule.num_slices} slices of {of}"
    return (
        f"rank {rank} never runs {what}; each of its stages needs {forward.kind} and B (or I and "
        f"W) of {of}\n"
        f"  {schedule.marked(rank, last)}"
    )


def _check_cap(schedule: Schedule, peaks: tuple[float, ...], cap: float | None, what: str) -> None:
    # pp / num_stages need not be exact in binary, nor its multiples.
    if cap is None or max(peaks) <= cap + 1e-9:
        return
    rank = peaks.index(max(peaks))
    index = len(schedule.rows[rank])
    if what == "activations":  # only their peak has a place in the row
        counts = list(live_counts(schedule.rows[rank], slices=schedule.slices))
        index = counts.index(max(counts))
    raise ScheduleError(
        f"rank {rank} of {schedule.label} keeps {peaks[rank]:g} {what} (in units of one "
        f"micro-batch on 1/pp of the model), the cap is {cap:g}; allow {max(peaks):g}, or use a "
        f"schedule that keeps less\n  {schedule.marked(rank, index)}"
    )


def _is_ascending(schedule: Schedule) -> bool:
    newest: dict[tuple[int, bool], int] = {}
    for row in schedule.rows:
        for stage, kind, microbatch, part in row:
            if kind in ("F", "R"):
                continue
            # The place of a backward in the sum without a pipeline: slices of a micro-batch in
            # reverse.
            number = (microbatch + 1) * schedule.num_slices - part
            if newest.get((stage, kind == "W"), 0) > number:
                return False
            newest[stage, kind == "W"] = number
    return True


def check_first_gradients(schedule: Schedule, rank: int) -> None:
    """Check that a stage's first forward and its first weight gradients are of one micro-batch.

    Layers of Transformer Engine with fused gradient accumulation do not add the gradient of the
    first micro-batch: they overwrite with it what is there. For the first one they take that whose
    forward was the first of the step. If another micro-batch has added to the gradient by then,
    that is lost, without an error.

    Raises:
        ScheduleError: On one of its stages they are of different micro-batches, or of different
            slices: backwards begin with a last one.
    """
    if schedule.num_slices > 1:
        raise ScheduleError(
            "slices run backward in reverse, so the first weight gradients are not those of the "
            "first forward; layers of Transformer Engine with fused gradient accumulation would "
            "lose gradients; use --no-gradient-accumulation-fusion"
        )
    # I computes the gradients that are never postponed, W those that may be, B both.
    adds = {"B": "IW", "I": "I", "W": "W"}
    opened: dict[int, int] = {}
    begun: set[tuple[int, str]] = set()
    for index, (stage, kind, microbatch, _) in enumerate(schedule.rows[rank]):
        # A stage begins with its forward: the micro-batch whose gradient its layers take for the
        # first one.
        first = opened.setdefault(stage, microbatch)
        for part in adds.get(kind, ""):
            if (stage, part) not in begun and microbatch != first:
                raise ScheduleError(
                    f"the first weight gradients of stage {stage} are those of micro-batch "
                    f"{microbatch}, its first forward is that of {first}; layers of Transformer "
                    f"Engine with fused gradient accumulation would lose gradients; begin with one "
                    f"micro-batch, or use --no-gradient-accumulation-fusion\n"
                    f"  {schedule.marked(rank, index)}"
                )
            begun.add((stage, part))


def _check_twins(schedule: Schedule) -> None:
    """Check that twins, which hold the same stages, reduce gradients in the same order.

    All other data-parallel peers run the same row, which they verify by the digest.
    """
    orders = [
        [f"the reduction of stage {stage}" for stage in reduction_order(row)]
        for row in literal_rows(schedule)
    ]
    last = schedule.pp - 1
    for rank in range(schedule.placement.num_ranks):
        members = {rank: orders[rank], last - rank: orders[last - rank]}
        check_group_order(f"twins {rank} and {last - rank}", members)


def check_group_order(group: str, members: Mapping[int, Sequence[object]]) -> None:
    """Check that all members of a process group run its collectives in the same order.

    Args:
        group: Name of the group, for the error.
        members: The collectives of each rank, in its order.

    Raises:
        ScheduleError: At the first position where two members differ.
    """
    first_rank, *others = members
    expected = members[first_rank]
    for rank in others:
        found = members[rank]
        for index in range(max(len(expected), len(found))):
            one = expected[index] if index < len(expected) else "none"
            two = found[index] if index < len(found) else "none"
            if one != two:
                raise ScheduleError(
                    f"{group}: collective {index} is {one} on rank {first_rank} and {two} on rank "
                    f"{rank}; run all collectives of a group in the same order on all its members"
                )
