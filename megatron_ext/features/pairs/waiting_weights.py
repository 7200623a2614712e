"""Runs W before its place in the table, while a rank would otherwise wait for tokens.

Experts get unequal numbers of tokens, so in every layer all ranks in a group wait for the slowest
one. `--pipeline-waiting-weights N` moves each W in a table back by N places (`weights_waiting`). A
W runs no later than its place in the table, which limits the memory for waiting W, and runs earlier
if its rank is idle:

* On CPUs, the host runs W until its peers have reached the exchange, one layer's weights at a time.
* On devices, each W is launched right after its I, on a low-priority stream that waits only for
  that I. The device runs W whenever the action stream leaves it idle. At the W's place in the
  table, the action stream waits for it.

W actions never overtake each other or a whole backward pass of their stage, so gradients are summed
in table order.
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
"""(stage, micro-batch) of a W."""


class WeightQueue:
    """One rank's W for one step, in row order."""

    def __init__(self, row: Row) -> None:
        self._queue: deque[_Queued] = deque()
        num_wholes: Counter[int] = Counter()
        for action in row:
            if action.kind == "B":
                num_wholes[action.stage] += 1
            elif action.kind == "W":
                key = (action.stage, action.microbatch)
                queued = _Queued(key, num_wholes[action.stage])
                self._queue.append(queued)
        # The I actions that have run but whose W actions have not.
        self._inputs_done: set[_Key] = set()
        # Stage -> number of whole backward passes that have run.
        self._wholes_done: Counter[int] = Counter()

    def ended(self, action: Action) -> None:
        """Record that an action has run, which may allow the next W to run."""
        if action.kind == "I":
            self._inputs_done.add((action.stage, action.microbatch))
        elif action.kind == "B":
            self._wholes_done[action.stage] += 1

    def first(self) -> _Key | None:
        """Return (stage, micro-batch) of the next W if it can already run, or None."""
        if not self._queue:
            return None
        key, num_wholes = self._queue[0]
        stage, _ = key
        has_all_wholes = self._wholes_done[stage] == num_wholes
        if key in self._inputs_done and has_all_wholes:
            return key
        return None

    def remove_first(self) -> None:
        """Remove the first W, which has run."""
        queued = self._queue.popleft()
        self._inputs_done.discard(queued.key)


class _Queued(NamedTuple):
    """A W that has not run."""

    key: _Key
    num_wholes: int
    """Number of whole backward passes on its stage that add to the same gradients before it."""


class WaitingWeights(ABC):
    """One step's W, which may run before their place in the table."""

    def __init__(self, row: Row, splits: SplitBackward) -> None:
        self.queue = WeightQueue(row)
        self.splits = splits

    @abstractmethod
    def ended(self, action: Action) -> None:
        """Handle an action, other than W, that has run and whose results have been sent."""

    @abstractmethod
    def finish(self, stage: int, microbatch: int) -> None:
        """Complete a W at its place in the table."""


class HostWeights(WaitingWeights):
    """One step's W on the host, which runs them until its peers arrive."""

    def ended(self, action: Action) -> None:
        """Record that an action has run."""
        self.queue.ended(action)

    def await_peers(self, group: dist.ProcessGroup) -> None:
        """Run W until all ranks in a group have called this. Collective over the group.

        Sleeps if there is no W to run. The group's time-out bounds the wait.
        """
        # The exchange itself would block this thread, so use a barrier to find out when
        # all ranks have arrived.
        arrival = dist.barrier(group, async_op=True)
        assert arrival is not None
        # Run W one layer at a time, because peers that arrive in the meantime have to
        # wait for this rank.
        while not arrival.is_completed():
            key = self.queue.first()
            if key is None:
                break
            if not self.splits.run_next(*key):
                self.queue.remove_first()
        arrival.wait()

    def finish(self, stage: int, microbatch: int) -> None:
        """Run whatever part of a W has not run yet."""
        self.splits.run(stage, microbatch)
        # If this W ran completely during exchanges, `await_peers` has removed it.
        if self.queue.first() == (stage, microbatch):
            self.queue.remove_first()


@dataclass(frozen=True)
class SideStreams:
    """The device streams on which actions and W run in parallel.

    CUDA's default stream has the lowest priority, so actions run on a different stream.
    """

    runtime: Any
    """`torch.cuda`, or a module with the same interface."""
    actions: Any
    """Stream for actions."""
    weights: Any
    """Stream for W, with a lower priority."""

    @classmethod
    def of_device(cls, backend: Device, device: torch.device) -> SideStreams:
        """Create the streams and give Megatron's plans a communication stream."""
        runtime = backend.runtime
        lowest, highest = runtime.Stream.priority_range()
        if lowest == highest:
            raise ScheduleError(
                "--pipeline-waiting-weights requires streams with two priority levels, but "
                f"{device} has only one; remove this flag"
            )
        actions = runtime.Stream(device, priority=highest)
        # Exchanges also have high priority: a W must not delay an exchange that other
        # ranks are waiting for.
        exchanges = runtime.Stream(device, priority=highest)
        utils.set_streams(comm_stream=exchanges)
        # Megatron keeps the process's first stream.
        if utils.get_comm_stream() != exchanges:
            _LOG.warning(
                "token exchanges run on the stream of an earlier training run in this process, "
                "whose priority may not be higher than that of weight gradients"
            )
        weights = runtime.Stream(device, priority=lowest)
        return cls(runtime, actions, weights)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Run a step on the action stream, ordered with respect to the current stream."""
        outer = self.runtime.current_stream()
        self.actions.wait_stream(outer)
        with self.runtime.stream(self.actions):
            try:
                yield
            finally:
                # Also wait after a failed step: the next step zeroes the gradients that
                # W adds to.
                outer.wait_stream(self.actions)
                outer.wait_stream(self.weights)


class DeviceWeights(WaitingWeights):
    """One step's W on a device, which runs them on a low-priority stream."""

    def __init__(
        self,
        row: Row,
        splits: SplitBackward,
        streams: SideStreams,
    ) -> None:
        super().__init__(row, splits)
        self._streams = streams
        self._launched: dict[_Key, _Launched] = {}
        splits.before_whole = self._await_weight

    def ended(self, action: Action) -> None:
        """Launch the W that can run after an action."""
        self.queue.ended(action)
        key = self.queue.first()
        if key is None:
            return
        weights = self._streams.weights
        # W reads the action's results, so order it after the action on the device.
        weights.wait_stream(self._streams.actions)
        while key is not None:
            # Keep references to the operands until the W's place in the table, where
            # the action stream waits for the W. Their memory belongs to streams that do
            # not wait for W, or to a message buffer, so it could be reused too early.
            gradients = self.splits.gradients(*key)
            with self._streams.runtime.stream(weights):
                self.splits.run(*key, in_current_stream=True)
            end = weights.record_event()
            self._launched[key] = _Launched(end, gradients)
            self.queue.remove_first()
            key = self.queue.first()

    def finish(self, stage: int, microbatch: int) -> None:
        """Make the action stream wait for a W and drop the W's operands."""
        launched = self._launched.pop((stage, microbatch))
        self._streams.actions.wait_event(launched.end)
        # The W has already been launched. This call only reports its gradients to a
        # reduction, which starts after the last ones.
        self.splits.run(stage, microbatch)

    def _await_weight(self, weight: torch.Tensor) -> None:
        """Make a backward pass that adds to a weight's gradient wait for all W that do the same."""
        for launched in self._launched.values():
            for gradient in launched.gradients:
                # Compare by identity: `in` would compare the tensors' elements.
                is_changed = any(weight is changed for changed in gradient.weights)
                if is_changed:
                    stream = self._streams.runtime.current_stream()
                    stream.wait_event(launched.end)


class _Launched(NamedTuple):
    """A W that has been launched and may still be running on the device."""

    end: Any
    """An event recorded after the W's last kernel."""
    gradients: list[WeightGradient]
    """The gradients that the W computes, which hold references to its operands."""
