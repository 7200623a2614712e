"""Proves that a table is a correct schedule, or shows where it is wrong.

Every registered schedule, every loaded CSV and every start-up goes through `validate`. It takes
milliseconds (about 1 us per action) and proves more than any run could: a table that passes
computes each gradient exactly once, and ends on every rank with any timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Kind, Schedule
from megatron_ext.schedules.table.memory import Edge, Memory, measure, slots_needed
from megatron_ext.schedules.table.walk import check_ends

# Actions done for one stage and micro-batch, as a bit set.
_BIT = {"F": 1, "R": 1, "B": 2, "I": 4, "W": 8}
# Compared as a whole and not bit by bit: an action that comes twice, and a B beside an I, differ
# from it as much as one that comes too early.
_BEFORE = {"F": 0, "R": 0, "B": 1, "I": 1, "W": 1 | 4}
_COMPLETE = (1 | 2, 1 | 4 | 8)
# I computes the gradients that are never postponed, W those that may be, B both.
_ADDS: Mapping[Kind, str] = {"B": "IW", "I": "I", "W": "W"}
_INSTEAD: Mapping[Kind, tuple[Kind, ...]] = {"B": ("I", "W"), "I": ("B",), "W": ("B",)}


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


def validate(schedule: Schedule) -> Report:
    """Check all properties of a table that are known before it runs.

    Raises:
        ScheduleError: The table is wrong; the message marks the place and states the rule.
    """
    check_actions(schedule)
    check_ends(schedule)
    return Report(measure(schedule), slots_needed(schedule), _is_ascending(schedule))


def check_actions(schedule: Schedule) -> None:
    """Check everything except deadlocks, which a simulation detects.

    Each rank computes exactly what its stages need: each action once, after what it needs.

    Raises:
        ScheduleError: At the first action that is duplicated, missing, too early or misplaced, or
            two actions that are no pair.
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
    for rank, row in enumerate(schedule.rows):
        mine = {
            stage: _kinds(schedule, stage, rank) for stage in schedule.placement.stages_of[rank]
        }
        for index, (stage, kind, microbatch, part) in enumerate(row):
            key = (stage * m + microbatch) * num_slices + part
            cells = forwards if kind == "F" else done
            if (
                kind not in mine.get(stage, "")
                or not (0 <= microbatch < m and 0 <= part < num_slices)
                or cells[key] != _BEFORE[kind]
                or (kind == "F" and part and not cells[key - 1])
                # Any backward of the later slice has set a higher bit than F.
                or (kind in ("B", "I") and part + 1 < num_slices and cells[key + 1] < _BIT["B"])
            ):
                raise ScheduleError(_misplaced(schedule, rank, index))
            cells[key] |= _BIT[kind]
    for key, bits in enumerate(done):
        if bits not in _COMPLETE:
            raise ScheduleError(_missing(schedule, key, bits))
    if schedule.disaggregated:
        for key, ran in enumerate(forwards):
            if not ran and schedule.runs_forward(key // m):
                raise ScheduleError(
                    f"rank {schedule.placement.rank_of[key // m]} never runs {key // m}F{key % m}, "
                    "which others need; forward ranks must run F of each micro-batch"
                )
    for rank in range(len(schedule.rows)):
        _check_pairs(schedule, rank)


def _kinds(schedule: Schedule, stage: int, rank: int) -> str:
    """Return the kinds of action of a stage that a rank which holds it runs."""
    if not schedule.disaggregated:
        return "FBIW"
    if schedule.placement.rank_of[stage] != rank:
        return "RBIW"
    return "F" if schedule.runs_forward(stage) else ""


def _misplaced(schedule: Schedule, rank: int, index: int) -> str:
    """Say why an action cannot run where it is."""
    action, before = schedule.rows[rank][index], schedule.rows[rank][:index]
    stage, kind, microbatch, part = action
    m, placement = schedule.num_microbatches, schedule.placement
    rule = ""
    if not 0 <= microbatch < m:
        rule = f"there are {m} micro-batches, 0 to {m - 1}"
    elif not 0 <= part < schedule.num_slices:
        rule = f"micro-batches have {schedule.num_slices} slices, 0 to {schedule.num_slices - 1}"
    elif stage >= schedule.num_stages:
        rule = f"there are {schedule.num_stages} stages, 0 to {schedule.num_stages - 1}"
    elif (owner := placement.rank_for(stage, kind)) != rank:
        held = ", ".join(map(str, placement.stages_of[rank])) or "none"
        rule = f"rank {rank} holds the stages {held}; {action} belongs to rank {owner}"
    elif kind not in _kinds(schedule, stage, rank):
        rule = f"nobody needs the output of {action}, because backward ranks recompute it"
        if kind == "R":
            rule = "R is for ranks that run backwards only; this one runs F"
    if rule:
        return f"{action} does not belong here: {rule}\n  {schedule.marked(rank, index)}"
    needed = [need for need in schedule.needs(action) if not schedule.travels(need, action)]
    missing = [need for need in needed if need not in before]
    if action in before:
        rule = f"it already ran as action {before.index(action)}; each action runs exactly once"
    elif not missing or any(
        action._replace(kind=other) in before for other in _INSTEAD.get(kind, ())
    ):
        rule = "a micro-batch has either one B or one I and one W on a stage, not both"
    else:
        rule = f"{missing[0]} has to run before it"
        if missing[0].slice < part:
            rule += ", because its keys and values are read"
        elif missing[0].slice > part:
            rule += ", because it adds to the gradients of keys and values"
    return f"{action} cannot run here: {rule}\n  {schedule.marked(rank, index)}"


def _missing(schedule: Schedule, key: int, bits: int) -> str:
    number, part = divmod(key, schedule.num_slices)
    stage, microbatch = divmod(number, schedule.num_microbatches)
    opens = Action(stage, "R" if schedule.disaggregated else "F", microbatch, part)
    rank = schedule.placement.rank_for(stage, "B")
    row = schedule.rows[rank]
    if not bits & _BIT["F"]:
        what, last = opens, len(row)
    elif bits & _BIT["I"]:
        what, last = opens._replace(kind="W"), row.index(opens._replace(kind="I"))
    else:
        what, last = opens._replace(kind="I" if schedule.splits_backward else "B"), row.index(opens)
    of = f"each of the {schedule.num_microbatches} micro-batches"
    if schedule.num_slices > 1:
        of = f"each of the {schedule.num_slices} slices of {of}"
    return (
        f"rank {rank} never runs {what}; each of its stages needs {opens.kind} and B (or I and W) "
        f"of {of}\n  {schedule.marked(rank, last)}"
    )


def _check_pairs(schedule: Schedule, rank: int) -> None:
    """Check that pairs are a forward and a backward of two micro-batches."""
    # The members of an expert group, which meet inside a pair, run the same row: they verify that
    # by the digest, which has the pairs.
    row, ends = schedule.rows[rank], 0
    for index in sorted(schedule.pairs_of(rank)):
        both = row[index : index + 2]
        if "".join(action.kind for action in both) not in ("FB", "FI"):
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


def _is_ascending(schedule: Schedule) -> bool:
    newest: dict[tuple[int, str], int] = {}
    for row in schedule.rows:
        for stage, kind, microbatch, part in row:
            # The place of a backward in the sum without a pipeline: slices of a micro-batch in
            # reverse.
            number = (microbatch + 1) * schedule.num_slices - part
            for gradients in _ADDS.get(kind, ""):
                if newest.get((stage, gradients), 0) > number:
                    return False
                newest[stage, gradients] = number
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
    consequence = (
        "layers of Transformer Engine with fused gradient accumulation would lose gradients;"
    )
    if schedule.num_slices > 1:
        raise ScheduleError(
            "slices run backward in reverse, so the first weight gradients are not those of the "
            f"first forward; {consequence} use --no-gradient-accumulation-fusion, or build the "
            "model with disable_parameter_transpose_cache"
        )
    first: dict[tuple[int, str], int] = {}
    for index, (stage, kind, microbatch, _) in enumerate(schedule.rows[rank]):
        # A stage begins with its forward.
        opened = first.setdefault((stage, "F"), microbatch)
        for part in _ADDS.get(kind, ""):
            if first.setdefault((stage, part), microbatch) != opened:
                raise ScheduleError(
                    f"the first weight gradients of stage {stage} are those of micro-batch "
                    f"{microbatch}, its first forward is that of {opened}; {consequence} begin "
                    "with one micro-batch, or use --no-gradient-accumulation-fusion\n"
                    f"  {schedule.marked(rank, index)}"
                )
