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
    from megatron_ext.message import MessageKind
    from megatron_ext.schedules.table.actions import Action, Row, Schedule


class Transfer(NamedTuple):
    """A message arrives (RECV), leaves (SEND) or stays on its rank for the next stage (LOCAL)."""

    verb: Literal["RECV", "SEND", "LOCAL"]
    message: Message
    peer: int
    """Pipeline rank at the other end; in a `Program` of the runtime the global rank."""
    to_twin: bool = False
    """Whether the peer belongs to the mirrored pipeline."""


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

    In a disaggregated table a forward rank may run `window` micro-batches ahead of the backward
    rank, which grants one more credit with each that it begins. None: no limit, no credits.
    """
    plan, placement = plan_routes(schedule.routes, schedule.placement), schedule.placement
    rank_for = placement.rank_for

    def transfers(action: Action, *, sends: bool) -> tuple[Transfer, ...]:
        verb: Literal["RECV", "SEND"] = "SEND" if sends else "RECV"
        found = []
        for other in schedule.feeds(action) if sends else schedule.needs(action):
            source, target = (action, other) if sends else (other, action)
            if schedule.travels(source, target):
                # Between both roles of one stage there is no hop: they are on two ranks.
                stays = source.stage == target.stage
                hop = "rank" if stays else placement.hops[min(source.stage, target.stage)]
                how, peer = "LOCAL" if hop == "local" else verb, rank_for(other.stage, other.kind)
                found.append(Transfer(how, tensor_of(target), peer, hop == "twin"))
        for sent in plan.hops_out(action) if sends else plan.hops_in(action):
            peer = rank_for(sent.taker if sends else sent.stage, _ENDS[sent.kind])
            found.append(Transfer(verb, sent.message(action), peer, sent.to_twin))
        return tuple(found)

    def exchange(action: Action) -> Exchange:
        stage, kind, microbatch, _ = action
        awaits: tuple[Transfer, ...] = ()
        grants: tuple[Transfer, ...] = ()
        # The first forwards need no credit: that is how far ahead the forward rank may be. And
        # nobody would await the last ones, so the step would end with messages under way.
        if window is not None and kind == "F" and microbatch >= window:
            awaits = (Transfer("RECV", Message("C", stage, microbatch), rank_for(stage, "R")),)
        if window is not None and kind == "R" and schedule.runs_forward(stage):
            granted = microbatch + window
            if granted < schedule.num_microbatches:
                grants = (Transfer("SEND", Message("C", stage, granted), rank_for(stage, "F")),)
        inputs, outputs = transfers(action, sends=False), transfers(action, sends=True)
        return Exchange(action, awaits, inputs, grants, outputs)

    row, pairs = schedule.rows[rank], schedule.pairs_of(rank)
    return tuple(
        exchange(row[index])._replace(partner=exchange(row[index + 1]))
        if index in pairs
        else exchange(row[index])
        for index in schedule.begins(rank)
    )


# By kind of a route's message, the kind of action at both of its ends.
_ENDS = {"P": "F", "G": "B"}


def tensor_of(action: Action) -> Message:
    """Return the name of the activation or gradient that an action takes."""
    kind: MessageKind = "F" if action.kind in ("F", "R") else "B"
    return Message(kind, action.stage, action.microbatch, action.slice)


def reduction_order(row: Row) -> tuple[int, ...]:
    """Return the stages of a row in the order in which their gradients complete."""
    last_use = {action.stage: index for index, action in enumerate(row)}
    return tuple(sorted(last_use, key=last_use.__getitem__))
