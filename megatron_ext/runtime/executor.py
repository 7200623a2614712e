"""Runs one rank's actions: receive inputs, compute, send results.

The executor is independent of schedules and policies: an `Order` yields the next action. If an
input has not arrived, the executor sleeps in the transport. Tensors passed between two stages on
the same rank bypass the transport. Every action and step is reported to observers (tracing, the
watchdog, statistics).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_ext.errors import MegatronExtError, TransportError
from megatron_ext.observer import Observer, overrides
from megatron_ext.schedules.table.costs import AHEAD

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.observer import Executed
    from megatron_ext.runtime.compute import StageCompute, Tensors
    from megatron_ext.runtime.ordering import Order, RunAhead
    from megatron_ext.runtime.program import Program, Table
    from megatron_ext.runtime.sync import Sync
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.schedules.table.communication import Exchange, Transfer
    from megatron_ext.transport.base import Transport

_NOTHING = nullcontext()


def num_out_of_order(executed: Sequence[Executed]) -> int:
    """Return how many of a step's actions ran before an action that precedes them in the table."""
    positions = [position for position, _, _ in executed]
    # Fast path: always taken for a static order.
    if positions == sorted(positions):
        return 0
    # `head` is the first action in the table that has not run.
    done = bytearray(len(positions))
    head = 0
    num_jumps = 0
    for position in positions:
        done[position] = 1
        if position == head:
            head = done.find(0, head)
        else:
            num_jumps += 1
    return num_jumps


class ProfilerRanges(Observer):
    """Labels each action (`2F0`, as in the table) in torch profiles, or in NVTX under nsys.

    With nsys, Megatron's `--profile` emits `record_function` ranges as NVTX ranges.
    """

    def __init__(self) -> None:
        self._ranges: list[torch.profiler.record_function] = []

    def begin_action(self, action: Action) -> None:
        """Open an action's range."""
        profiler_range = torch.profiler.record_function(str(action))
        self._ranges.append(profiler_range)
        profiler_range.__enter__()

    def end_action(self, position: int, action: Action) -> None:
        """Close the action's range."""
        profiler_range = self._ranges.pop()
        profiler_range.__exit__(None, None, None)


@dataclass
class Executor:
    """One step on one rank."""

    table: Table
    program: Program
    """The program of `table`."""
    order: Order
    compute: StageCompute
    sync: Sync
    transport: Transport
    timeout_s: float
    name_of: Callable[[int | None], str]
    """Returns a global rank's name for error messages; None means this rank."""
    run_ahead: RunAhead | None = None
    """Limits how far the host can run ahead of the device; None if actions run on the host."""
    observers: Sequence[Observer] = ()
    _handed: dict[Message, torch.Tensor | None] = field(
        default_factory=dict, init=False
    )
    """Tensors in transit between two stages of this rank."""
    _remaining: dict[int, int] = field(init=False)
    """Stage -> number of its actions that have not run yet."""
    _begins: list[Observer] = field(init=False)
    """Observers that override `begin_action`."""
    _ends: list[Observer] = field(init=False)
    """Observers that override `end_action`."""
    _executed: list[Executed] = field(default_factory=list, init=False)

    def run(self) -> None:
        """Run every action in the table, in the order that `order` yields.

        Raises:
            TransportError: An input timed out, its peer failed, or an action did not finish on the
                device in time; the message names the blocked action.
            MegatronExtError: The order stopped before all actions had run.
        """
        begin_s = time.perf_counter()
        observers = list(self.observers)
        # Profilers start and stop between steps. Without a profiler, ranges are pure overhead.
        if torch._C._autograd._profiler_enabled():
            observers.append(ProfilerRanges())
        # The device may be idle between actions, so only call the observers that
        # override a method.
        self._begins = []
        self._ends = []
        for observer in observers:
            if overrides(observer, "begin_action"):
                self._begins.append(observer)
            if overrides(observer, "end_action"):
                self._ends.append(observer)
        self._remaining = dict(self.table.actions_by_stage)
        # Announce messages before the first action: some wires need to know a message's
        # size, or to have a buffer for it, before it arrives.
        expected = [*self.order.expected(), *self.program.expected]
        self.transport.begin(expected, self.table.slots)
        exchanges = self.program.exchanges
        begins = self.table.begins
        for choice in self.order:
            if isinstance(choice, int):
                exchange = exchanges[choice]
                begin = begins[choice]
                end = begin + len(exchange.actions)
                self._run(range(begin, end), exchange)
            else:
                forward, backward = choice
                partner = exchanges[backward]
                pair = exchanges[forward]._replace(partner=partner)
                self._run(choice, pair)
        # Flush here, so that this step reports a failed send rather than a later one.
        self.transport.flush(self.timeout_s)
        wall_s = time.perf_counter() - begin_s
        self._check_complete()
        for observer in observers:
            observer.end_step(self._executed, wall_s)

    def _run(self, positions: Sequence[int], exchange: Exchange) -> None:
        actions = exchange.actions
        partner = exchange.partner
        run_ahead = self.run_ahead
        # Wait before receiving the inputs, because received tensors would occupy device memory
        # during the wait.
        if run_ahead is not None:
            run_ahead.wait_until(AHEAD - 1)
        for stage, *_ in actions:
            # Start gathering parameters before receiving, so that the gather overlaps the wait for
            # the inputs.
            if self._remaining[stage] == self.table.actions_by_stage[stage]:
                self.sync.before(stage)
            self._remaining[stage] -= 1
        inputs = self._inputs(exchange)
        gradients = [] if partner is None else self._inputs(partner)
        # In a pair, this is the backward action. A pair's forward action is never the
        # last one on its stage and has no saved tensors.
        action = actions[-1]
        stage, is_last = action.stage, not self._remaining[action.stage]
        # This reference keeps a backward action's graph alive until the results have been sent (see
        # below).
        is_backward = action.kind in ("B", "I")
        saved = self.compute.saved_tensors(action) if is_backward else None
        for observer in self._begins:
            for begun in actions:
                observer.begin_action(begun)
        if run_ahead is not None:
            run_ahead.begin()
        begin_s = time.perf_counter()
        # Share one empty context: creating a new one here would take as long as the bookkeeping.
        with self.sync.around_last(action) if is_last else _NOTHING:
            if partner is None:
                outputs = self.compute.run(action, inputs)
            else:
                outputs, sent_back = self.compute.run_pair(
                    exchange.action,
                    action,
                    inputs,
                    gradients,
                )
        end_s = time.perf_counter()
        took_s = (end_s - begin_s) / len(actions)
        if run_ahead is not None:
            name = action if partner is None else " and ".join(map(str, actions))
            run_ahead.record(name)
        for observer in self._ends:
            for position, ended in zip(
                reversed(positions),
                reversed(actions),
                strict=True,
            ):
                observer.end_action(position, ended)
        if exchange.outputs:
            self._deliver(exchange, outputs)
        if partner is not None and partner.outputs:
            self._deliver(partner, sent_back)
        # Free the graph only after sending: freeing it takes as long as a send, and a peer is
        # waiting.
        del saved
        for position, ended in zip(positions, actions, strict=True):
            self._executed.append((position, ended, took_s))
        if is_last:
            self.sync.after(stage)
        self.compute.ended(action)

    def _inputs(self, exchange: Exchange) -> Tensors:
        """Receive the credits and tensors that an action needs, then grant credits to its peers."""
        for credit in exchange.awaits:
            self._receive(exchange, credit)
        inputs: Tensors = []
        for transfer in exchange.inputs:
            if transfer.verb != "LOCAL":
                inputs.append(self._receive(exchange, transfer))
            elif transfer.message in self._handed:
                inputs.append(self._handed.pop(transfer.message))
            else:
                raise MegatronExtError(
                    f"{exchange.action} cannot run before {transfer.message} is available"
                )
        # Grant credits only after the receives: a credit lets a forward rank send a message into
        # one of the slots that the receives have freed.
        for credit in exchange.grants:
            empty = torch.empty(0, dtype=torch.uint8)
            self.transport.isend(empty, credit.peer, credit.message)
        return inputs

    def _receive(self, exchange: Exchange, transfer: Transfer) -> torch.Tensor:
        try:
            return self.transport.recv(
                transfer.peer,
                transfer.message,
                self.timeout_s,
            )
        except TransportError as error:
            exchanges = self.program.exchanges
            number = 0
            while exchange.action not in exchanges[number].actions:
                number += 1
            raise type(error)(
                f"{self.name_of(None)} cannot run {exchange.action}, action "
                f"{number} of its {len(exchanges)} in "
                f"{self.table.schedule.label}; it waits for {self.name_of(transfer.peer)}: {error}"
            ) from error

    def _deliver(self, exchange: Exchange, tensors: Tensors) -> None:
        for transfer, tensor in zip(exchange.outputs, tensors, strict=True):
            message = transfer.message
            if transfer.verb != "LOCAL":
                assert tensor is not None
                self.transport.isend(tensor, transfer.peer, message)
                continue
            self._handed[message] = tensor
            if message.kind == "F" and tensor is not None:
                # Detach, so that the backward pass stops at the stage boundary.
                self._handed[message] = tensor.detach()
            self.order.handed(message)
        # `release` replaces these tensors' data, but the transport and the next stage
        # hold references to the storage.
        if exchange.action.kind == "F":
            self.compute.release(tensors)

    def _check_complete(self) -> None:
        # If an order that stopped early went unnoticed, the gradients would be
        # incomplete.
        executed = {position for position, _, _ in self._executed}
        row = self.table.schedule.rows[self.table.rank]
        leftovers: list[str] = []
        for position, action in enumerate(row):
            if position not in executed:
                leftovers.append(str(action))
        leftovers += self.compute.unfinished()
        for message in self._handed:
            leftovers.append(f"the action that needs {message}")
        if leftovers:
            raise MegatronExtError(
                f"{self.table.schedule.label}: {leftovers[0]} was never executed"
            )
