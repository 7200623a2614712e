"""Derives from a table what each rank receives, sends, hands over, reduces and gathers.

Generators place computation only. This pass adds, around each action, the messages that it needs
and makes. A message has a name (kind, stage that needs it, micro-batch), so a receiver may take
messages in any order and a send never waits for the order in which its peer receives. Where two
stages that follow each other share a rank, the tensor is handed over and no message exists.

Markers say where the gradients of a stage are complete (after its last B or W), so that their
reduction over the data-parallel ranks can start, and where its parameters are needed first (before
its first F), so that gathering them can be awaited there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megatron_ext.messages import Message
from megatron_ext.schedules.representation.actions import Action, Row, Schedule

__all__ = [
    "Mark",
    "Operation",
    "Step",
    "Transfer",
    "lower",
    "operations",
    "reduction_order",
    "runs_forward",
]


class Transfer(NamedTuple):
    """A tensor arrives (RECV), leaves (SEND) or stays on its rank for the next stage (LOCAL)."""

    verb: Literal["RECV", "SEND", "LOCAL"]
    message: Message
    peer: int
    """Rank of the same pipeline that the tensor comes from or goes to."""
    to_twin: bool = False
    """Whether that peer is the one of the mirrored pipeline instead."""
    copy: bool = False
    """Whether it goes to a backward rank, beside what goes on to the next forward rank."""

    def __str__(self) -> str:
        """Return the form of torch.distributed.pipelining, where a SEND names the sending stage."""
        kind, stage, microbatch, _ = self.message
        if self.verb == "SEND":
            stage += -1 if kind == "F" else 1
        return f"{stage}{self.verb}_{kind}{microbatch}"


class Mark(NamedTuple):
    """A collective over the data-parallel ranks that may start (reduce) or must be done (sync)."""

    verb: Literal["REDUCE_GRAD", "PARAM_SYNC"]
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.verb}"


Step = Action | Transfer | Mark


def lower(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Return the program of each rank: its actions in the table's order, with all else added."""
    return tuple(_program(schedule, row) for row in schedule.rows)


@dataclass(frozen=True)
class Operation:
    """One action with all that belongs to it: what the executor runs at once."""

    action: Action
    needs: Transfer | None
    """The message that it waits for; None where its input was handed over, or is the data."""
    makes: Transfer | None
    """Where its result goes; None at the ends of the pipeline, and for W and R."""
    is_first: bool
    """Whether no action of its stage comes before: parameters are needed from here on."""
    is_last: bool
    """Whether no action of its stage comes after: gradients are complete from here on."""
    copies: Transfer | None = None
    """The backward rank that a forward rank sends something to as well: its result or, in `ship`
    mode, what it saved."""


def operations(schedule: Schedule, rank: int) -> tuple[Operation, ...]:
    """Return the program of one rank, by action."""
    found: list[Operation] = []
    needs: Transfer | None = None
    is_first = False
    for step in _program(schedule, schedule.rows[rank]):
        if isinstance(step, Action):
            found.append(Operation(step, needs, None, is_first, False))
            needs, is_first = None, False
        elif isinstance(step, Mark):
            if step.verb == "PARAM_SYNC":
                is_first = True
            else:
                found[-1] = replace(found[-1], is_last=True)
        elif step.verb == "RECV":
            needs = step
        elif step.copy:
            found[-1] = replace(found[-1], copies=step)
        else:
            found[-1] = replace(found[-1], makes=step)
    return tuple(found)


def _program(schedule: Schedule, row: Row) -> tuple[Step, ...]:
    last_use = {action.stage: index for index, action in enumerate(row)}
    seen: set[int] = set()
    steps: list[Step] = []
    for index, action in enumerate(row):
        if action.stage not in seen:
            seen.add(action.stage)
            steps.append(Mark("PARAM_SYNC", action.stage))
        if action.kind != "W":
            steps += _needs(schedule, action)
        steps.append(action)
        if action.kind not in ("W", "R"):
            steps += _makes(schedule, action)
        if action.kind == "F" and schedule.disaggregated:
            steps += _copies(schedule, action)
        if last_use[action.stage] == index:
            steps.append(Mark("REDUCE_GRAD", action.stage))
    return tuple(steps)


def _needs(schedule: Schedule, action: Action) -> list[Step]:
    if action.kind == "R":
        return _needs_again(schedule, action)
    source = action.stage - 1 if action.kind == "F" else action.stage + 1
    if not 0 <= source < schedule.num_stages:
        return []
    hop = schedule.placement.hops[min(source, action.stage)]
    if hop == "local":
        return []  # the LOCAL step of the stage that made it is enough
    message = Message("F" if action.kind == "F" else "B", action.stage, action.microbatch)
    peer = schedule.placement.rank_for(source, action.kind)
    return [Transfer("RECV", message, peer, hop == "twin")]


def _needs_again(schedule: Schedule, action: Action) -> list[Step]:
    """What R takes: the output of the stage before, or what the own stage's forward saved."""
    source = action.stage - (not schedule.ships_activations)
    if source < 0:
        return []
    message = Message("F", action.stage, action.microbatch)
    return [Transfer("RECV", message, schedule.placement.rank_for(source, "F"))]


def _copies(schedule: Schedule, action: Action) -> list[Step]:
    target = action.stage + (not schedule.ships_activations)
    if target >= schedule.num_stages:
        return []
    message = Message("F", target, action.microbatch)
    return [Transfer("SEND", message, schedule.placement.rank_for(target, "R"), copy=True)]


def _makes(schedule: Schedule, action: Action) -> list[Step]:
    target = action.stage + 1 if action.kind == "F" else action.stage - 1
    if not 0 <= target < schedule.num_stages:
        return []
    if schedule.disaggregated and action.kind == "F" and not runs_forward(schedule, target):
        return []
    hop = schedule.placement.hops[min(target, action.stage)]
    message = Message("F" if action.kind == "F" else "B", target, action.microbatch)
    peer = schedule.placement.rank_for(target, action.kind)
    return [Transfer("LOCAL" if hop == "local" else "SEND", message, peer, hop == "twin")]


def runs_forward(schedule: Schedule, stage: int) -> bool:
    """Tell whether some rank runs the F of a stage.

    Where backward ranks run forwards again nobody needs what the last stage's F would make.
    """
    is_last = stage == schedule.num_stages - 1
    return not (schedule.disaggregated and is_last) or schedule.ships_activations


def reduction_order(row: Row) -> list[Mark]:
    """Return the gradient reductions of a row in their order: that of the stages' last actions."""
    last_use = {action.stage: index for index, action in enumerate(row)}
    return [Mark("REDUCE_GRAD", stage) for stage in sorted(last_use, key=last_use.__getitem__)]
