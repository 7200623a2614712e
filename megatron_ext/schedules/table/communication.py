"""Derives the messages that each action of a table receives and sends.

Generators place computation only; this pass adds the messages. A message has a name (kind, stage
that needs it, micro-batch), so a receiver may take messages in any order, and a send never waits
for its peer's receive order. Between two consecutive stages on one rank the tensor stays local.

Gradient reductions are not messages: the executor starts a stage's reduction after its last action.
`reduction_order` gives the order, which all data-parallel peers must share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.message import Message
from megatron_ext.schedules.table.route_plan import plan_routes

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Row, Schedule
    from megatron_ext.schedules.table.route_plan import Hop, Plan

__all__ = [
    "Exchange",
    "Transfer",
    "exchanges",
    "lower",
    "reduction_order",
    "route_receivers",
    "runs_forward",
]


class Transfer(NamedTuple):
    """A message arrives (RECV), leaves (SEND) or stays on its rank for the next stage (LOCAL)."""

    verb: Literal["RECV", "SEND", "LOCAL"]
    message: Message
    peer: int
    """Pipeline rank at the other end; in a `Program` of the runtime the global rank."""
    to_twin: bool = False
    """Whether the peer belongs to the mirrored pipeline."""

    def __str__(self) -> str:
        """Return the form of torch.distributed.pipelining, where a SEND names the sending stage."""
        kind, stage, microbatch, _ = self.message
        if self.verb == "SEND" and kind in ("F", "B"):
            stage += -1 if kind == "F" else 1
        return f"{stage}{self.verb}_{kind}{microbatch}"


class Exchange(NamedTuple):
    """One action and its messages, in the order in which the executor processes them."""

    action: Action
    awaits: tuple[Transfer, ...] = ()
    """Credits that it needs to begin."""
    inputs: tuple[Transfer, ...] = ()
    """RECV or LOCAL: from a neighbouring stage, if there is one; then what routes bring."""
    grants: tuple[Transfer, ...] = ()
    """Credits that it grants as soon as it has its inputs."""
    outputs: tuple[Transfer, ...] = ()
    """SEND or LOCAL: for the stage after or before, if there is one; then what routes take. None
    for W and R."""


def exchanges(schedule: Schedule, rank: int, window: int | None = None) -> tuple[Exchange, ...]:
    """Return the exchanges of a rank, one for each action of its row.

    Args:
        schedule: The table.
        rank: Pipeline rank.
        window: In a disaggregated table: the number of micro-batches that a forward rank may run
            ahead of the backward rank, which grants one more credit with each that it begins.
            None: no limit and no credits.
    """
    plan = plan_routes(schedule.routes, schedule.placement) if schedule.routes else None
    return tuple(
        Exchange(
            action,
            _awaits(schedule, action, window),
            _inputs(schedule, action) + _routed(schedule, plan, action, "RECV"),
            _grants(schedule, action, window),
            _outputs(schedule, action) + _routed(schedule, plan, action, "SEND"),
        )
        for action in schedule.rows[rank]
    )


def _routed(
    schedule: Schedule, plan: Plan | None, action: Action, verb: Literal["RECV", "SEND"]
) -> tuple[Transfer, ...]:
    """Return the messages of routes around an action."""
    if plan is None:
        return ()
    rank_for, microbatch = schedule.placement.rank_for, action.microbatch
    if verb == "RECV":
        return tuple(
            Transfer(
                verb, hop.message(microbatch), rank_for(hop.stage, _SENDERS[hop.kind]), hop.to_twin
            )
            for hop in plan.hops_in(action)
        )
    return tuple(
        Transfer(verb, hop.message(microbatch), rank_for(hop.taker, kind), hop.to_twin)
        for hop in plan.hops_out(action)
        for kind in route_receivers(schedule, hop)
    )


_SENDERS = {"P": "F", "G": "B"}
"""By kind of a route's message, the kind of action that sends it."""


def route_receivers(schedule: Schedule, hop: Hop) -> tuple[str, ...]:
    """Return the kinds of action that receive a route's message, each on its own rank.

    In a disaggregated table the forward rank and the backward rank of a stage both run the layer
    that takes the tensor.
    """
    if hop.kind == "G":
        return ("B",)
    if not schedule.disaggregated:
        return ("F",)
    return ("F", "R") if runs_forward(schedule, hop.taker) else ("R",)


def lower(schedule: Schedule) -> tuple[tuple[Action | Transfer, ...], ...]:
    """Return the program of each rank: its actions in the table's order with all messages."""
    return tuple(
        tuple(step for exchange in exchanges(schedule, rank) for step in _flat(exchange))
        for rank in range(len(schedule.rows))
    )


def _flat(exchange: Exchange) -> list[Action | Transfer]:
    """List a local tensor once, as the output of its producer."""
    arriving = (transfer for transfer in exchange.inputs if transfer.verb == "RECV")
    return [*arriving, exchange.action, *exchange.outputs]


def _inputs(schedule: Schedule, action: Action) -> tuple[Transfer, ...]:
    stage, kind, microbatch = action
    if kind == "W":
        return ()
    if kind == "R":
        return _inputs_again(schedule, action)
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < schedule.num_stages:
        return ()
    hop = schedule.placement.hops[min(source, stage)]
    message = Message("F" if kind == "F" else "B", stage, microbatch)
    peer = schedule.placement.rank_for(source, kind)
    return (Transfer("LOCAL" if hop == "local" else "RECV", message, peer, hop == "twin"),)


def _inputs_again(schedule: Schedule, action: Action) -> tuple[Transfer, ...]:
    """Inputs of R: the previous stage's output, or the layer inputs that its own F saved."""
    source = action.stage - (not schedule.ships_activations)
    if source < 0:
        return ()
    message = Message("F", action.stage, action.microbatch)
    return (Transfer("RECV", message, schedule.placement.rank_for(source, "F")),)


def _outputs(schedule: Schedule, action: Action) -> tuple[Transfer, ...]:
    stage, kind, microbatch = action
    if kind in ("W", "R"):
        return ()
    copies = _copies(schedule, action) if kind == "F" and schedule.disaggregated else ()
    target = stage + 1 if kind == "F" else stage - 1
    if not 0 <= target < schedule.num_stages:
        return copies
    if schedule.disaggregated and kind == "F" and not runs_forward(schedule, target):
        return copies
    hop = schedule.placement.hops[min(target, stage)]
    message = Message("F" if kind == "F" else "B", target, microbatch)
    peer = schedule.placement.rank_for(target, kind)
    return (Transfer("LOCAL" if hop == "local" else "SEND", message, peer, hop == "twin"), *copies)


def _copies(schedule: Schedule, action: Action) -> tuple[Transfer, ...]:
    """Messages to a backward rank: the output of F, or in `ship` mode the saved layer inputs."""
    target = action.stage + (not schedule.ships_activations)
    if target >= schedule.num_stages:
        return ()
    message = Message("F", target, action.microbatch)
    return (Transfer("SEND", message, schedule.placement.rank_for(target, "R")),)


def _awaits(schedule: Schedule, action: Action, window: int | None) -> tuple[Transfer, ...]:
    stage, kind, microbatch = action
    if window is None or kind != "F" or microbatch < window:
        return ()
    return (Transfer("RECV", Message("C", *action[::2]), schedule.placement.rank_for(stage, "R")),)


def _grants(schedule: Schedule, action: Action, window: int | None) -> tuple[Transfer, ...]:
    stage, kind, microbatch = action
    if window is None or kind != "R" or not runs_forward(schedule, stage):
        return ()
    if microbatch + window >= schedule.num_microbatches:
        return ()
    message = Message("C", stage, microbatch + window)
    return (Transfer("SEND", message, schedule.placement.rank_for(stage, "F")),)


def runs_forward(schedule: Schedule, stage: int) -> bool:
    """Return whether some rank runs the F of a stage.

    If backward ranks recompute forwards, nobody needs the output of the last stage's F.
    """
    is_last = stage == schedule.num_stages - 1
    return not (schedule.disaggregated and is_last) or schedule.ships_activations


def reduction_order(row: Row) -> tuple[int, ...]:
    """Return the stages of a row in the order in which their gradients complete."""
    last_use = {action.stage: index for index, action in enumerate(row)}
    return tuple(sorted(last_use, key=last_use.__getitem__))
