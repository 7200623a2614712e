"""Derives the messages that a table's actions receive and send.

Generators only place computation. This pass adds the messages. Every message has a name (kind,
receiving stage, micro-batch), so a receiver may consume messages in any order, and a send never
depends on the order of its peer's receives. If two consecutive stages are on the same rank, the
tensor between them stays local.

Gradient reductions are not messages. The executor starts a stage's reduction after the stage's last
action. `reduction_order` returns the stage order, which must be the same on all data-parallel
peers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.message import Message
from megatron_ext.schedules.table.actions import Action

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ext.message import MessageKind
    from megatron_ext.schedules.table.actions import Bypass, Kind, Row, Schedule
    from megatron_ext.schedules.table.placement import Hop

    _BypassesByPlace = dict[tuple[str, int], list[Bypass]]
    """By (kind of message, stage that sends or receives it)."""


class Transfer(NamedTuple):
    """A message that arrives (RECV), leaves (SEND) or stays local for the next stage (LOCAL)."""

    verb: Literal["RECV", "SEND", "LOCAL"]
    message: Message
    peer: int
    """The peer's pipeline rank or, in a `runtime.program.Program`, its global rank."""
    to_twin: bool = False
    """Whether the peer belongs to the mirrored pipeline."""


class Exchange(NamedTuple):
    """An action and its messages, in the order in which the executor handles them."""

    action: Action
    awaits: tuple[Transfer, ...] = ()
    """Credits that must arrive before the action starts."""
    inputs: tuple[Transfer, ...] = ()
    """RECV or LOCAL from a neighbouring stage, if any, followed by the RECVs of bypasses."""
    grants: tuple[Transfer, ...] = ()
    """Credits to grant as soon as the inputs have arrived."""
    outputs: tuple[Transfer, ...] = ()
    """SEND or LOCAL to the next or previous stage, if any, followed by the SENDs of bypasses. Empty
    for W and R."""
    partner: Exchange | None = None
    """The backward pass that runs as a pair with this forward pass. Neither runs until the inputs
    of both have arrived. Outputs are sent after both have run, the forward pass's first."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """The action, or both actions in a pair."""
        if self.partner is None:
            return (self.action,)
        return (self.action, self.partner.action)

    @property
    def all_inputs(self) -> tuple[Transfer, ...]:
        """The inputs of the action, or of both actions in a pair."""
        if self.partner is None:
            return self.inputs
        return self.inputs + self.partner.inputs

    @property
    def all_outputs(self) -> tuple[Transfer, ...]:
        """The outputs of the action, or of both actions in a pair."""
        if self.partner is None:
            return self.outputs
        return self.outputs + self.partner.outputs


def exchanges(
    schedule: Schedule,
    rank: int,
    window: int | None = None,
) -> tuple[Exchange, ...]:
    """Return a rank's exchanges, one per action or pair in its row, in order.

    In a disaggregated table, a forward rank may run `window` micro-batches ahead of the backward
    rank, which grants a credit for every micro-batch that it starts. None means no limit, and no
    credits are sent.
    """
    messages = _Messages(schedule, window)
    row = schedule.rows[rank]
    pairs = schedule.pairs_of(rank)
    row_exchanges: list[Exchange] = []
    for index in schedule.begins(rank):
        exchange = messages.exchange(row[index])
        if index in pairs:
            partner = messages.exchange(row[index + 1])
            exchange = exchange._replace(partner=partner)
        row_exchanges.append(exchange)
    return tuple(row_exchanges)


class _Messages:
    """The messages of every action in a table."""

    def __init__(self, schedule: Schedule, window: int | None) -> None:
        self._schedule = schedule
        self._window = window
        self._sent_bypasses: _BypassesByPlace = defaultdict(list)
        self._received_bypasses: _BypassesByPlace = defaultdict(list)
        for bypass in schedule.bypasses:
            sending_place = (bypass.kind, bypass.stage)
            self._sent_bypasses[sending_place].append(bypass)
            receiving_place = (bypass.kind, bypass.taker)
            self._received_bypasses[receiving_place].append(bypass)
        # By kind and stage. All micro-batches and slices have the same messages, and
        # deriving them for every action would take ten times as long.
        self._patterns: dict[tuple[Kind, int], Exchange] = {}

    def exchange(self, action: Action) -> Exchange:
        """Return an action with its messages but without a partner."""
        stage, kind, microbatch, slice_index = action
        place = (kind, stage)
        if place not in self._patterns:
            first_action = Action(stage, kind, 0)
            self._patterns[place] = self._pattern(first_action)
        pattern = self._patterns[place]
        return Exchange(
            action,
            self._awaited_credits(action),
            _renamed(pattern.inputs, microbatch, slice_index),
            self._granted(action),
            _renamed(pattern.outputs, microbatch, slice_index),
        )

    def _pattern(self, action: Action) -> Exchange:
        """Return an action for micro-batch 0 with its messages but without credits."""
        # On both the sender and the receiver, tensors of neighbouring stages precede
        # bypasses.
        inputs = []
        for needed in self._schedule.needs(action):
            if self._schedule.travels(needed, action):
                inputs.append(self._transfer("RECV", needed, action, peer=needed))
        bypass_kind = _BYPASS_KIND.get(action.kind, "")
        place = (bypass_kind, action.stage)
        for bypass in self._received_bypasses.get(place, ()):
            inputs.append(
                self._past_stages("RECV", bypass, action, peer_stage=bypass.stage)
            )
        outputs = []
        for target in self._schedule.feeds(action):
            if self._schedule.travels(action, target):
                outputs.append(self._transfer("SEND", action, target, peer=target))
        for bypass in self._sent_bypasses.get(place, ()):
            outputs.append(
                self._past_stages("SEND", bypass, action, peer_stage=bypass.taker)
            )
        return Exchange(
            action,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )

    def _transfer(
        self,
        verb: Literal["RECV", "SEND"],
        source: Action,
        target: Action,
        *,
        peer: Action,
    ) -> Transfer:
        """Return the transfer for the tensor from `source` to `target`."""
        placement = self._schedule.placement
        hop: Hop = "rank"
        # `placement.hops` does not cover a stage's two roles, which are on different
        # ranks.
        if source.stage != target.stage:
            lower_stage = min(source.stage, target.stage)
            hop = placement.hops[lower_stage]
        tensor = tensor_of(target)
        peer_rank = placement.rank_for(peer.stage, peer.kind)
        if hop == "local":
            return Transfer("LOCAL", tensor, peer_rank)
        return Transfer(verb, tensor, peer_rank, to_twin=hop == "twin")

    def _past_stages(
        self,
        verb: Literal["RECV", "SEND"],
        bypass: Bypass,
        action: Action,
        *,
        peer_stage: int,
    ) -> Transfer:
        """Return a bypass's transfer as seen by the rank that runs `action`."""
        placement = self._schedule.placement
        peer_kind = _BYPASS_ENDS[bypass.kind]
        return Transfer(
            verb,
            bypass.message(action),
            placement.rank_for(peer_stage, peer_kind),
            bypass.to_twin,
        )

    def _awaited_credits(self, action: Action) -> tuple[Transfer, ...]:
        stage, kind, microbatch, _ = action
        if self._window is None or kind != "F":
            return ()
        # The first `window` forward passes need no credit, because the forward rank may
        # run that far ahead.
        if microbatch < self._window:
            return ()
        backward_rank = self._schedule.placement.rank_for(stage, "R")
        credit = Message("C", stage, microbatch)
        return (Transfer("RECV", credit, backward_rank),)

    def _granted(self, action: Action) -> tuple[Transfer, ...]:
        stage, kind, microbatch, _ = action
        if self._window is None or kind != "R":
            return ()
        if not self._schedule.runs_forward(stage):
            return ()
        granted = microbatch + self._window
        # No forward pass waits for a credit beyond the last micro-batch, so such a
        # message would still be in flight at the end of the step.
        if granted >= self._schedule.num_microbatches:
            return ()
        forward_rank = self._schedule.placement.rank_for(stage, "F")
        credit = Message("C", stage, granted)
        return (Transfer("SEND", credit, forward_rank),)


def _renamed(
    transfers: Sequence[Transfer],
    microbatch: int,
    slice_index: int,
) -> tuple[Transfer, ...]:
    """Return micro-batch 0's transfers, renamed for another micro-batch and slice."""
    renamed = []
    for verb, message, peer, to_twin in transfers:
        name = Message(
            message.kind,
            message.stage,
            microbatch,
            slice_index,
            message.part,
        )
        renamed.append(Transfer(verb, name, peer, to_twin))
    return tuple(renamed)


# Kind of action -> the kind of bypass that it receives and sends.
_BYPASS_KIND = {"F": "P", "B": "G", "I": "G"}
# Kind of bypass -> the kind of action that sends and receives it. A stage's I runs on
# the same rank as its B, so B stands for both.
_BYPASS_ENDS = {"P": "F", "G": "B"}


def tensor_of(action: Action) -> Message:
    """Return the message that carries the activation or gradient that an action needs."""
    needs_activation = action.kind in ("F", "R")
    kind: MessageKind = "F" if needs_activation else "B"
    return Message(kind, action.stage, action.microbatch, action.slice)


def reduction_order(row: Row) -> tuple[int, ...]:
    """Return the stages in a row in the order in which their gradients are completed."""
    last_index: dict[int, int] = {}
    for index, action in enumerate(row):
        last_index[action.stage] = index
    return tuple(sorted(last_index, key=last_index.__getitem__))
