"""Proves that a table is a correct schedule, or shows where it is wrong.

`validate` checks every generated or loaded table: at start-up for a full batch, and again before a
step that needs a table of a different size. Validation takes milliseconds (about 1 us per action)
and proves more than any run could: a table that passes computes every gradient exactly once and
completes on every rank, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Kind, Schedule
from megatron_ext.schedules.table.memory import Edge, Memory, measure, slots_needed
from megatron_ext.schedules.table.walk import check_for_deadlock

# Bits in the set of actions that have run for a stage, micro-batch and slice.
_BIT = {
    "F": 1,
    "R": 1,
    "B": 2,
    "I": 4,
    "W": 8,
}
# By kind: the set required just before the action runs. Comparing entire sets detects
# early actions, duplicates, and a B in addition to an I.
_BEFORE = {
    "F": 0,
    "R": 0,
    "B": 1,
    "I": 1,
    "W": 1 | 4,
}
# The set after a step: F and B, or F, I and W.
_COMPLETE = (1 | 2, 1 | 4 | 8)
# I also sums the weight gradients that do not wait for W, such as those of norms. W
# sums the remaining gradients, and B sums all of them.
_GRADIENTS_OF: Mapping[Kind, str] = {
    "B": "IW",
    "I": "I",
    "W": "W",
}
# By kind of backward action: the kinds that a table may contain instead.
_REPLACED_BY: Mapping[Kind, tuple[Kind, ...]] = {
    "B": ("I", "W"),
    "I": ("B",),
    "W": ("B",),
}


@dataclass(frozen=True)
class Report:
    """A correct table's properties, each computed on first access."""

    schedule: Schedule

    @cached_property
    def memory(self) -> Memory:
        """By rank: peak memory."""
        return measure(self.schedule)

    @cached_property
    def slots(self) -> Mapping[Edge, int]:
        """By edge: the number of receive slots that keeps sends from ever waiting."""
        return slots_needed(self.schedule)

    @cached_property
    def ascending(self) -> bool:
        """Whether gradients are summed in the same order as without a pipeline, bit for bit.

        If so, every stage runs its backward passes (and its W) in micro-batch order, and every
        micro-batch's slices in reverse order.
        """
        return is_ascending(self.schedule)


def validate(schedule: Schedule) -> Report:
    """Check everything about a table that can be checked before it runs.

    Raises:
        ScheduleError: The table is invalid; the message marks the place and states the rule.
    """
    check_actions(schedule)
    check_for_deadlock(schedule)
    return Report(schedule)


def check_actions(schedule: Schedule) -> None:
    """Check everything except deadlocks, which simulation detects.

    Every rank must run exactly the actions that its stages need, each exactly once and after its
    inputs.

    Raises:
        ScheduleError: An action is duplicated, missing, too early or misplaced, or two actions
            cannot form a pair; the message shows the first error.
    """
    num_ranks = schedule.placement.num_ranks
    if len(schedule.rows) != num_ranks:
        raise ScheduleError(
            f"{schedule.label} has {len(schedule.rows)} rows, but its {schedule.placement.name} "
            f"placement has {num_ranks} ranks; a table has one row per rank"
        )
    if schedule.num_slices > 1 and schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} runs forward and backward passes on different ranks, but both ranks "
            "would need the keys and values of earlier slices; remove slices"
        )
    # Use one byte per stage, micro-batch and slice. Checking a large table with a set
    # of actions would take many times as long.
    done = bytearray(schedule.num_stages * schedule.places_per_stage)
    forwards = done
    if schedule.disaggregated:
        # Forward passes run on a different rank, so they are no precondition for the
        # actions on this rank.
        forwards = bytearray(len(done))
    for rank in range(num_ranks):
        _check_row(schedule, rank, done, forwards)
    microbatches = range(schedule.num_microbatches)
    nums_slices = [schedule.num_slices_of(microbatch) for microbatch in microbatches]
    for key, bits in enumerate(done):
        if bits not in _COMPLETE and _has_slice(schedule, key, nums_slices):
            raise ScheduleError(_missing(schedule, key, bits))
    if schedule.disaggregated:
        _check_forwards(schedule, forwards)
    for rank in range(num_ranks):
        _check_pairs(schedule, rank)


def _has_slice(schedule: Schedule, key: int, nums_slices: Sequence[int]) -> bool:
    """Return whether place `key` holds a slice.

    `nums_slices` is the number of slices by micro-batch.
    """
    number, slice_index = divmod(key, schedule.num_slices)
    microbatch = number % schedule.num_microbatches
    return slice_index < nums_slices[microbatch]


def _check_row(
    schedule: Schedule,
    rank: int,
    done: bytearray,
    forwards: bytearray,
) -> None:
    """Check that every action on a rank may run at its position, and record that it ran.

    `done` and `forwards` hold the actions' bits by stage, micro-batch and slice.

    Raises:
        ScheduleError: An action is misplaced, duplicated or too early; the message shows the first
            error.
    """
    m = schedule.num_microbatches
    num_slices = schedule.num_slices
    num_slices_of = [schedule.num_slices_of(microbatch) for microbatch in range(m)]
    row = schedule.rows[rank]
    kinds_of = {}
    for stage in schedule.placement.stages_of[rank]:
        kinds_of[stage] = _kinds(schedule, stage, rank)
    for index, (stage, kind, microbatch, slice_index) in enumerate(row):
        key = (stage * m + microbatch) * num_slices + slice_index
        cells = forwards if kind == "F" else done
        # Check all cases in a single condition, because this loop runs for millions of
        # actions. `_misplaced` determines the reason afterwards.
        if (
            kind not in kinds_of.get(stage, "")
            or not (
                0 <= microbatch < m and 0 <= slice_index < num_slices_of[microbatch]
            )
            or cells[key] != _BEFORE[kind]
            or (kind == "F" and slice_index and not cells[key - 1])
            # If the next slice's backward pass has run, a bit above the F bit is set.
            or (
                kind in ("B", "I")
                and slice_index + 1 < num_slices_of[microbatch]
                and cells[key + 1] < _BIT["B"]
            )
        ):
            raise ScheduleError(_misplaced(schedule, rank, index))
        cells[key] |= _BIT[kind]


def _check_forwards(schedule: Schedule, forwards: bytearray) -> None:
    """Check that a disaggregated table's forward ranks run every F that other ranks need.

    Raises:
        ScheduleError: A forward pass is missing.
    """
    for key, ran in enumerate(forwards):
        stage, microbatch = divmod(key, schedule.num_microbatches)
        if not ran and schedule.runs_forward(stage):
            raise ScheduleError(
                f"rank {schedule.placement.rank_of[stage]} never runs {stage}F{microbatch}, "
                "which other ranks need; forward ranks must run every micro-batch's F"
            )


def _kinds(schedule: Schedule, stage: int, rank: int) -> str:
    """Return which kinds of actions a rank runs on one of its stages."""
    if not schedule.disaggregated:
        return "FBIW"
    if schedule.placement.rank_of[stage] != rank:
        return "RBIW"
    return "F" if schedule.runs_forward(stage) else ""


def _misplaced(schedule: Schedule, rank: int, index: int) -> str:
    """Explain why an action cannot run at its position."""
    action = schedule.rows[rank][index]
    marked = schedule.marked(rank, index)
    foreign = _foreign(schedule, rank, action)
    if foreign:
        return f"{action} does not belong here: {foreign}\n  {marked}"
    return (
        f"{action} cannot run here: {_out_of_order(schedule, rank, index)}\n  {marked}"
    )


def _foreign(schedule: Schedule, rank: int, action: Action) -> str:
    """Explain why an action cannot be in a rank's row at all, or return "" if it can."""
    stage, kind, microbatch, slice_index = action
    m = schedule.num_microbatches
    placement = schedule.placement
    # Check the numbers first, because only a valid stage has a rank.
    if not 0 <= microbatch < m:
        return f"there are {m} micro-batches, 0 to {m - 1}"
    num_slices = schedule.num_slices_of(microbatch)
    if not 0 <= slice_index < num_slices:
        subject = "micro-batches have"
        if schedule.slice_sizes:
            subject = f"micro-batch {microbatch} has"
        return f"{subject} {num_slices} slices, 0 to {num_slices - 1}"
    if stage >= schedule.num_stages:
        return f"there are {schedule.num_stages} stages, 0 to {schedule.num_stages - 1}"
    owner = placement.rank_for(stage, kind)
    if owner != rank:
        rank_stages = map(str, placement.stages_of[rank])
        stages = ", ".join(rank_stages) or "none"
        return f"rank {rank} holds stages {stages}; {action} belongs to rank {owner}"
    if kind in _kinds(schedule, stage, rank):
        return ""
    if kind == "R":
        return "R is for ranks that run only backward passes, but this rank runs F"
    return f"no rank needs the output of {action}, because backward ranks recompute it"


def _out_of_order(schedule: Schedule, rank: int, index: int) -> str:
    """Explain why an action is at the wrong position in a rank's row."""
    action = schedule.rows[rank][index]
    before = schedule.rows[rank][:index]
    if action in before:
        return f"it already ran as action {before.index(action)}; each action runs exactly once"
    for kind in _REPLACED_BY.get(action.kind, ()):
        if action._replace(kind=kind) in before:
            return _ONE_BACKWARD
    missing = None
    for needed in schedule.needs(action):
        # Inputs from other ranks arrive as messages, which `check_for_deadlock` follows.
        is_local = not schedule.travels(needed, action)
        if is_local and needed not in before:
            missing = needed
            break
    if missing is None:
        return _ONE_BACKWARD
    rule = f"{missing} has to run before it"
    if missing.slice < action.slice:
        rule += ", because this action reads its keys and values"
    elif missing.slice > action.slice:
        rule += ", because it adds to the gradients of keys and values"
    return rule


_ONE_BACKWARD = "a micro-batch has either one B or one I and one W on a stage, not both"


def _missing(schedule: Schedule, key: int, bits: int) -> str:
    """Explain which action is missing for the stage, micro-batch and slice at place `key`."""
    number, slice_index = divmod(key, schedule.num_slices)
    stage, microbatch = divmod(number, schedule.num_microbatches)
    rank = schedule.placement.rank_for(stage, "B")
    row = schedule.rows[rank]
    # On a backward rank, R takes the place of F.
    first_kind: Kind = "R" if schedule.disaggregated else "F"
    opening = Action(stage, first_kind, microbatch, slice_index)
    # Mark where the missing action could be: the end of the row for a forward pass,
    # otherwise the preceding action.
    if not bits & _BIT["F"]:
        missing = opening
        index = len(row)
    elif bits & _BIT["I"]:
        missing = opening._replace(kind="W")
        index = row.index(opening._replace(kind="I"))
    else:
        backward: Kind = "I" if schedule.splits_backward else "B"
        missing = opening._replace(kind=backward)
        index = row.index(opening)
    parts = f"each of the {schedule.num_microbatches} micro-batches"
    if schedule.slice_sizes:
        parts = f"each slice of {parts}"
    elif schedule.num_slices > 1:
        parts = f"each of the {schedule.num_slices} slices of {parts}"
    return (
        f"rank {rank} never runs {missing}; each of its stages needs {opening.kind} and B "
        f"(or I and W) for {parts}\n  {schedule.marked(rank, index)}"
    )


def _check_pairs(schedule: Schedule, rank: int) -> None:
    """Check that every pair is a forward and a backward pass for different micro-batches.

    Raises:
        ScheduleError: A pair is invalid; the message shows the first one.
    """
    # The ranks in an expert group communicate within a pair, so they must run the same
    # row. The table's digest ensures this, because it covers the pairs.
    row = schedule.rows[rank]
    previous_end = 0
    for index in sorted(schedule.pairs_of(rank)):
        pair = row[index : index + 2]
        kinds = "".join(action.kind for action in pair)
        if kinds not in ("FB", "FI"):
            rule = "a pair is an F and the B or I right after it"
        elif pair[0].microbatch == pair[1].microbatch:
            rule = "both are for the same micro-batch, so its backward pass must wait for its F"
        elif schedule.disaggregated:
            rule = "forward and backward passes run on different ranks"
        elif index < previous_end:
            rule = f"{pair[0]} is in two pairs"
        else:
            previous_end = index + 2
            continue
        names = ";".join(map(str, pair))
        raise ScheduleError(
            f"({names}) is not a pair: {rule}\n  {schedule.marked(rank, index)}"
        )


def is_ascending(schedule: Schedule) -> bool:
    """Return whether all stages in a valid table sum gradients as they would without a pipeline."""
    # By stage and kind of gradient: the position of the last gradient that was added.
    last_places: dict[tuple[int, str], int] = {}
    for row in schedule.rows:
        for stage, kind, microbatch, slice_index in row:
            # Without a pipeline, the gradients of a micro-batch's slices are added in
            # reverse.
            place = (microbatch + 1) * schedule.num_slices - slice_index
            for gradients in _GRADIENTS_OF.get(kind, ""):
                last_place = last_places.get((stage, gradients), 0)
                if last_place > place:
                    return False
                last_places[stage, gradients] = place
    return True


def check_first_gradients(schedule: Schedule, rank: int) -> None:
    """Check that a stage's first forward pass and first weight gradient are for one micro-batch.

    With fused gradient accumulation, Transformer Engine layers overwrite the sum with the first
    micro-batch's gradient instead of adding to it, assuming that the first micro-batch is the one
    whose forward pass ran first in the step. If another micro-batch has already added its gradient,
    that gradient is lost without an error.

    Raises:
        ScheduleError: On one of the rank's stages, the two belong to different micro-batches, or to
            different slices, because backward passes start with the last slice.
    """
    consequence = (
        "Transformer Engine's layers with fused gradient accumulation would lose "
        "gradients;"
    )
    if schedule.num_slices > 1:
        raise ScheduleError(
            "slices run their backward passes in reverse order, so the first weight gradients do "
            f"not belong to the first forward pass; {consequence} use "
            "--no-gradient-accumulation-fusion, or build the model with "
            "disable_parameter_transpose_cache"
        )
    # By stage and F or kind of gradient: the micro-batch that came first.
    first: dict[tuple[int, str], int] = {}
    for index, (stage, kind, microbatch, _) in enumerate(schedule.rows[rank]):
        # A stage's first action is a forward pass.
        first_forward = first.setdefault((stage, "F"), microbatch)
        for gradients in _GRADIENTS_OF.get(kind, ""):
            first_backward = first.setdefault((stage, gradients), microbatch)
            if first_backward != first_forward:
                raise ScheduleError(
                    f"the first weight gradients of stage {stage} are those of micro-batch "
                    f"{microbatch}, but its first forward pass is that of {first_forward}; "
                    f"{consequence} start both with the same micro-batch, or use "
                    "--no-gradient-accumulation-fusion\n"
                    f"  {schedule.marked(rank, index)}"
                )
