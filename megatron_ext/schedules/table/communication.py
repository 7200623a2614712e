"""Derives the messages that each action of a table receives and sends.

Generators place computation only; this pass adds the messages. A message has a name (kind, stage
that needs it, micro-batch), so a receiver may take messages in any order, and a send never waits
for its peer's receive order. Between two consecutive stages on one rank the tensor stays local.

Gradient reductions are not messages: the executor starts a stage's reduction after its last action.
`reduction_order` gives the order, which all data-parallel peers must share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message
from megatron_ext.schedules.table.memory import Edge, slots_needed
from megatron_ext.schedules.table.route_plan import plan_routes
from megatron_ext.schedules.table.walk import walk

if TYPE_CHECKING:
    from megatron_ext.message import MessageKind
    from megatron_ext.schedules.table.actions import Action, Row, Schedule
    from megatron_ext.schedules.table.route_plan import RoutePlan


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
        kind, stage, microbatch, part = self.message[:4]
        if self.verb == "SEND" and kind in ("F", "B"):
            stage += -1 if kind == "F" else 1
        return f"{stage}{self.verb}_{kind}{microbatch}{f'.{part}' if part else ''}"


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
    partner: Exchange | None = None
    """The backward that runs with this forward as a pair. Everything that either needs comes before
    both, and everything that either makes leaves after both, the forward's first."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """The action, or both of a pair."""
        return (self.action,) if self.partner is None else (self.action, self.partner.action)

    @property
    def all_inputs(self) -> tuple[Transfer, ...]:
        """The inputs of the action, or of both of a pair."""
        return self.inputs if self.partner is None else self.inputs + self.partner.inputs

    @property
    def all_outputs(self) -> tuple[Transfer, ...]:
        """The outputs of the action, or of both of a pair."""
        return self.outputs if self.partner is None else self.outputs + self.partner.outputs


def exchanges(schedule: Schedule, rank: int, window: int | None = None) -> tuple[Exchange, ...]:
    """Return the exchanges of a rank, one for each action or pair of its row, in order.

    Args:
        schedule: The table.
        rank: Pipeline rank.
        window: In a disaggregated table: the number of micro-batches that a forward rank may run
            ahead of the backward rank, which grants one more credit with each that it begins.
            None: no limit and no credits.
    """
    plan = plan_routes(schedule.routes, schedule.placement) if schedule.routes else None

    def exchange(action: Action) -> Exchange:
        inputs = [
            _tensor(schedule, needed, action, sends=False)
            for needed in schedule.needs(action)
            if schedule.travels(needed, action)
        ]
        outputs = [
            _tensor(schedule, action, fed, sends=True)
            for fed in schedule.feeds(action)
            if schedule.travels(action, fed)
        ]
        return Exchange(
            action,
            _awaits(schedule, action, window),
            (*inputs, *_routed(schedule, plan, action, "RECV")),
            _grants(schedule, action, window),
            (*outputs, *_routed(schedule, plan, action, "SEND")),
        )

    row, pairs = schedule.rows[rank], schedule.pairs_of(rank)
    if not pairs:
        return tuple(map(exchange, row))
    return tuple(
        exchange(row[index])._replace(partner=exchange(row[index + 1]) if index in pairs else None)
        for index in schedule.begins(rank)
    )


def _routed(
    schedule: Schedule, plan: RoutePlan | None, action: Action, verb: Literal["RECV", "SEND"]
) -> tuple[Transfer, ...]:
    """Return the messages of routes around an action."""
    if plan is None:
        return ()
    rank_for = schedule.placement.rank_for
    if verb == "RECV":
        return tuple(
            Transfer(verb, hop.message(action), rank_for(hop.stage, _ENDS[hop.kind]), hop.to_twin)
            for hop in plan.hops_in(action)
        )
    return tuple(
        Transfer(verb, hop.message(action), rank_for(hop.taker, _ENDS[hop.kind]), hop.to_twin)
        for hop in plan.hops_out(action)
    )


# By kind of a route's message, the kind of action at both of its ends.
_ENDS = {"P": "F", "G": "B"}


def lower(schedule: Schedule) -> tuple[tuple[Action | Transfer, ...], ...]:
    """Return the program of each rank: its actions in the table's order with all messages."""
    programs = []
    for rank in range(len(schedule.rows)):
        program: list[Action | Transfer] = []
        for exchange in exchanges(schedule, rank):
            # A local tensor is listed once, as the output of its producer.
            program += (transfer for transfer in exchange.all_inputs if transfer.verb == "RECV")
            program += (*exchange.actions, *exchange.all_outputs)
        programs.append(tuple(program))
    return tuple(programs)


def tensor_of(action: Action) -> Message:
    """Return the name of the activation or gradient that an action takes."""
    kind: MessageKind = "F" if action.kind in ("F", "R") else "B"
    return Message(kind, action.stage, action.microbatch, action.slice)


def _tensor(schedule: Schedule, source: Action, target: Action, *, sends: bool) -> Transfer:
    """Return how the result of an action reaches one that needs it, seen from one of the two."""
    other = target if sends else source
    peer = schedule.placement.rank_for(other.stage, other.kind)
    # Between both roles of one stage there is no hop: they are on two ranks.
    hops, stages = schedule.placement.hops, (source.stage, target.stage)
    hop = "rank" if source.stage == target.stage else hops[min(stages)]
    verb: Literal["RECV", "SEND"] = "SEND" if sends else "RECV"
    return Transfer("LOCAL" if hop == "local" else verb, tensor_of(target), peer, hop == "twin")


def _awaits(schedule: Schedule, action: Action, window: int | None) -> tuple[Transfer, ...]:
    stage, kind, microbatch, _ = action
    # The first ones need no credit: that is how far ahead the forward rank may be.
    if window is None or kind != "F" or microbatch < window:
        return ()
    message = Message("C", stage, microbatch)
    return (Transfer("RECV", message, schedule.placement.rank_for(stage, "R")),)


def _grants(schedule: Schedule, action: Action, window: int | None) -> tuple[Transfer, ...]:
    stage, kind, microbatch, _ = action
    if window is None or kind != "R" or not schedule.runs_forward(stage):
        return ()
    # Nobody would await it, and the step would end with a message under way.
    if microbatch + window >= schedule.num_microbatches:
        return ()
    message = Message("C", stage, microbatch + window)
    return (Transfer("SEND", message, schedule.placement.rank_for(stage, "F")),)


def reduction_order(row: Row) -> tuple[int, ...]:
    """Return the stages of a row in the order in which their gradients complete."""
    last_use = {action.stage: index for index, action in enumerate(row)}
    return tuple(sorted(last_use, key=last_use.__getitem__))


def check_slots(schedule: Schedule, slots: int) -> None:
    """Check that a table ends if each edge holds at most `slots` unused messages.

    Our transports give every edge the slots of `memory.slots_needed`, so no send waits. With fewer,
    a send waits until the receiver has used an earlier message of the same edge and kind, and an
    acyclic table can deadlock.

    Raises:
        ScheduleError: It deadlocks; the message shows each rank's position and the number of slots
            that suffices.
    """
    if schedule.disaggregated:
        raise ScheduleError(
            f"{schedule.label} needs a slot for each micro-batch, because forwards never wait for "
            "backwards; leave the number of slots out"
        )
    placement = schedule.placement
    unused: dict[Edge, int] = {}

    def edge(source: int | None, target: int | None, kind: str) -> Edge | None:
        if source is None or target is None or placement.hops[min(source, target)] == "local":
            return None
        return placement.rank_of[source], placement.rank_of[target], "F" if kind == "F" else "B"

    def visit(rank: int, index: int, _taken: object) -> tuple[bool, bool] | None:
        end = index + (2 if index in schedule.pairs_of(rank) else 1)
        actions = schedule.rows[rank][index:end]
        sends = [edge(s, placement.target(s, kind), kind) for s, kind, _, _ in actions]
        # Both slots of a pair are needed at once, because it hands on when both have ended.
        if any(to is not None and unused.get(to, 0) >= slots for to in sends):
            return None
        for to in sends:
            if to is not None:
                unused[to] = unused.get(to, 0) + 1
        for stage, kind, _, _ in actions:
            source = edge(placement.source(stage, kind), stage, kind)
            if source is not None:
                unused[source] -= 1
        return (True, True)

    stuck = walk(schedule, visit)
    if stuck:
        lines = [f"{schedule.label} gets stuck with {slots} receive slots on each edge:"]
        lines += [f"  {schedule.marked(rank, index)}" for rank, index in list(stuck.items())[:4]]
        lines.append(f"with {max(slots_needed(schedule).values())} slots no send ever waits")
        raise ScheduleError("\n".join(lines))
