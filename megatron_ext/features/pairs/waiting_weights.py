"""Runs W before its place in the table, while a rank would otherwise wait for tokens.

Experts get unequal numbers of tokens, so in each layer all ranks of a group wait for the slowest
one. `--pipeline-waiting-weights N` moves each W of a table N places back (`weights_waiting`). The
table is the bound: it says how many W may wait, with their memory, and by when each one is done. In
between, a W runs when its rank is idle:

* If the host computes, it runs W until its peers have come to the exchange, one layer's weights at
  a time.
* A device gets each W right after its I, in a stream of low priority that waits only for that I.
  The device itself then runs W when the stream of the actions leaves it idle. A W's place in the
  table is where that stream waits for it.

W never overtake each other, and never a whole backward of their stage, so gradients are summed in
the order of the table.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import utils

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    from megatron_ext.devices.backend import Device
    from megatron_ext.runtime.split import SplitBackward
    from megatron_ext.runtime.weight_gradients import WeightGradient
    from megatron_ext.schedules.table.actions import Action, Row

_LOG = logging.getLogger(__name__)
_Key = tuple[int, int]


class WeightQueue:
    """The W of one rank and step, in the order of its row."""

    def __init__(self, row: Row) -> None:
        self._queue: deque[_Queued] = deque()
        num_wholes: Counter[int] = Counter()
        for action in row:
            if action.kind == "B":
                num_wholes[action.stage] += 1
            elif action.kind == "W":
                key = action.stage, action.microbatch
                self._queue.append(_Queued(key, num_wholes[action.stage]))
        self._inputs_done: set[_Key] = set()
        # By stage: the number of whole backwards that have run.
        self._wholes_done: Counter[int] = Counter()

    def ended(self, action: Action) -> None:
        """Record an action that has run; it may let the next W run."""
        if action.kind == "I":
            self._inputs_done.add((action.stage, action.microbatch))
        elif action.kind == "B":
            self._wholes_done[action.stage] += 1

    def first(self) -> _Key | None:
        """Return the W that may run next, as (stage, micro-batch); None: none may yet."""
        if not self._queue:
            return None
        key, num_wholes = self._queue[0]
        if key in self._inputs_done and self._wholes_done[key[0]] == num_wholes:
            return key
        return None

    def remove_first(self) -> None:
        """Remove the first W, which has run."""
        self._inputs_done.discard(self._queue.popleft().key)


class _Queued(NamedTuple):
    """A W that has not run."""

    key: _Key
    num_wholes: int
    """Whole backwards of its stage that add to the same gradients before it."""


class WaitingWeights(ABC):
    """The W of one step, which may run before their place in the table."""

    def __init__(self, row: Row, splits: SplitBackward) -> None:
        self.queue = WeightQueue(row)
        self.splits = splits

    @abstractmethod
    def ended(self, action: Action) -> None:
        """Called when an action that is not a W has run and its results have been sent."""

    @abstractmethod
    def finish(self, stage: int, microbatch: int) -> None:
        """Complete a W at its place in the table."""


class HostWeights(WaitingWeights):
    """W on the host, which computes them until its peers arrive."""

    def ended(self, action: Action) -> None:
        """Note an action that has run."""
        self.queue.ended(action)

    def await_peers(self, group: dist.ProcessGroup) -> None:
        """Run W until all ranks of a group have come here. Collective over the group.

        Without a W to run, this sleeps. The group's time-out bounds the wait.
        """
        arrival = dist.barrier(group, async_op=True)
        assert arrival is not None
        # One layer's weights at a time: peers may arrive during a W, and then wait for this rank.
        while not arrival.is_completed():
            key = self.queue.first()
            if key is None:
                break
            if not self.splits.run_next(*key):
                self.queue.remove_first()
        arrival.wait()

    def finish(self, stage: int, microbatch: int) -> None:
        """Run what is left of a W."""
        self.splits.run(stage, microbatch)
        if self.queue.first() == (stage, microbatch):
            self.queue.remove_first()


@dataclass(frozen=True)
class SideStreams:
    """The streams of a device in which actions and W run side by side.

    CUDA's default stream has the lowest priority, so actions run in another one.
    """

    runtime: Any
    """`torch.cuda`, or a module with its interface."""
    actions: Any
    weights: Any

    @classmethod
    def of_device(cls, backend: Device, device: torch.device) -> SideStreams:
        """Create the streams, and give Megatron's plans a communication stream."""
        runtime = backend.runtime
        lowest, highest = runtime.Stream.priority_range()
        if lowest == highest:
            raise ScheduleError(
                f"--pipeline-waiting-weights needs streams of two priorities, and {device} has "
                "one; leave it out"
            )
        actions = runtime.Stream(device, priority=highest)
        # W must not hold back an exchange, for which other ranks wait.
        exchanges = runtime.Stream(device, priority=highest)
        utils.set_streams(comm_stream=exchanges)
        if (
            utils.get_comm_stream() != exchanges
        ):  # Megatron keeps the first one of the process
            _LOG.warning(
                "exchanges of tokens run in the stream of an earlier training in this process, "
                "which may lack the high priority that keeps weight gradients behind them"
            )
        return cls(runtime, actions, runtime.Stream(device, priority=lowest))

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Run a step in the stream of actions, between the current stream's work."""
        outer = self.runtime.current_stream()
        self.actions.wait_stream(outer)
        with self.runtime.stream(self.actions):
            try:
                yield
            finally:
                # After a failed step too: the next one zeroes the gradients that W adds to.
                outer.wait_stream(self.actions)
                outer.wait_stream(self.weights)


class DeviceWeights(WaitingWeights):
    """W on a device, which runs them in a stream of low priority."""

    def __init__(self, row: Row, splits: SplitBackward, streams: SideStreams) -> None:
        super().__init__(row, splits)
        self._streams = streams
        self._launched: dict[_Key, _Launched] = {}
        splits.before_whole = self._await_weight

    def ended(self, action: Action) -> None:
        """Launch the W that may run after an action, behind that action."""
        self.queue.ended(action)
        key = self.queue.first()
        if key is None:
            return
        weights = self._streams.weights
        weights.wait_stream(self._streams.actions)
        while key is not None:
            # Hold the operands until the W's place in the table, where the actions' stream waits
            # for it: their memory belongs to streams that do not wait, and may be a message.
            gradients = self.splits.gradients(*key)
            with self._streams.runtime.stream(weights):
                self.splits.run(*key, in_current_stream=True)
            self._launched[key] = _Launched(weights.record_event(), gradients)
            self.queue.remove_first()
            key = self.queue.first()

    def finish(self, stage: int, microbatch: int) -> None:
        """Make the actions' stream wait for a W, and drop its operands."""
        launched = self._launched.pop((stage, microbatch))
        self._streams.actions.wait_event(launched.end)
        # Reports to a reduction that starts when this W has computed the last gradients.
        self.splits.run(stage, microbatch)

    def _await_weight(self, weight: torch.Tensor) -> None:
        """Make a backward that adds to a weight's gradient wait for the W that do so."""
        for launched in self._launched.values():
            for gradient in launched.gradients:
                if any(weight is changed for changed in gradient.weights):
                    self._streams.runtime.current_stream().wait_event(launched.end)


class _Launched(NamedTuple):
    """A W that the device may be running."""

    end: Any
    """An event."""
    gradients: list[WeightGradient]
    """What the W computes; holds its operands."""
