"""Orders a rank's actions and limits how far the host can run ahead of the device.

The order comes from the rank's table, from a policy, or from a leader's decisions.

The executor iterates over positions in the table. By the time it requests the next position, it has
launched the previous action. If the host itself runs the actions, that action is complete by then,
but a device may still be running it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.errors import (
    MegatronExtError,
    PeerClosed,
    PeerDied,
    TransportTimeout,
)
from megatron_ext.message import Message
from megatron_ext.schedules.table.costs import AHEAD
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from megatron_ext.devices.backend import Device
    from megatron_ext.runtime.program import Table
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.transport.base import Transport


# Following a leader cannot deadlock. Ranks with the same leader run their actions in
# the same order, so treat them as one rank. A leader runs only actions whose inputs
# have arrived, so the leader of the previous stage has run the action that produced
# them. That leader's followers run this action too, so their peers on this stage
# receive their inputs.
def elect_leader(
    *groups: dist.ProcessGroup, twins: Iterable[int] = ()
) -> tuple[int, list[int]]:
    """Return this rank's leader, and its followers if it is one. Collective over the job.

    An action may contain a collective over tensor-, context- or expert-parallel ranks, or over two
    twins that read data for each other. Ranks that share such groups, directly or via other ranks,
    follow the same leader, which sends its choices as messages.

    Args:
        groups: Groups that run collectives inside actions, in addition to the expert groups.
        twins: Global ranks outside the groups that must follow the same order.
    """
    experts = (
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_tensor_parallel_group(check_initialized=False),
    )
    peers = {dist.get_rank(), *twins}
    for group in (*groups, *experts):
        if group is not None:
            peers.update(dist.get_process_group_ranks(group))
    # Gather over the whole job, because two ranks without a common group may be linked through a
    # third rank.
    peers_by_rank: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(peers_by_rank, peers)
    leader_of = leaders(peers_by_rank)
    me = dist.get_rank()
    followers = []
    for rank, leader in enumerate(leader_of):
        if leader == me and rank != me:
            followers.append(rank)
    return leader_of[me], followers


def leaders(peers: Sequence[Iterable[int]]) -> list[int]:
    """Return the lowest rank in each rank's connected component.

    `peers` contains, for each rank, the ranks that must follow the same order.
    """
    # Union-find: `leader` holds each rank's parent, and a root is its own parent.
    leader = list(range(len(peers)))

    def root(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank]
        return rank

    for rank, peers_of_rank in enumerate(peers):
        for peer in peers_of_rank:
            roots = (root(rank), root(peer))
            leader[max(roots)] = min(roots)
    return [root(rank) for rank in range(len(peers))]


Choice = int | tuple[int, int]
"""Position of the exchange to run next, or the positions of a forward and a backward action that
run as a pair. Only a dynamic order yields the latter. Its tables have no pairs, so every exchange
is a single action, and has the action's position in the row."""


@dataclass
class Order:
    """The order in which a rank runs a step's actions. This class uses the table's order."""

    table: Table

    def expected(self) -> list[Expected]:
        """Return the messages that the order itself receives, apart from the actions' messages."""
        return []

    def __iter__(self) -> Iterator[Choice]:
        """Yield choices; the caller runs each choice before requesting the next one."""
        return iter(range(len(self.table.exchanges)))

    def handed(self, message: Message) -> None:
        """Record that a tensor is available for another stage on this rank."""


@dataclass
class PolicyOrder(Order):
    """Runs the ready action that a policy chooses; sleeps if none is ready."""

    policy: Policy
    transport: Transport
    num_parts: Mapping[str, int]
    """Message kind -> number of tensors in a message."""
    followers: Sequence[int]
    """Global ranks that follow these decisions."""
    timeout_s: float
    run_ahead: RunAhead | None = None
    """Reports when the device has completed an action; None if actions run on the host."""
    _durations: Sequence[float] = field(init=False)
    """Action index -> cost in units. Empty if the policy never waits."""
    _ran_s: float = field(default=0.0, init=False)
    """Total time of the actions completed in this step."""
    _ran_units: float = field(default=0.0, init=False)
    """Total cost of these actions, in units."""
    _arrived: Counter[Message] = field(default_factory=Counter, init=False)
    """Multi-tensor message -> number of its tensors, or launch notices, that have arrived."""
    _running: deque[Sequence[int]] = field(default_factory=deque, init=False)
    """Single actions or pairs that the device has not completed, oldest first."""
    _idle_s: float = field(default=0.0, init=False)
    """The time, on the host's clock, at which this rank became idle."""

    def __post_init__(self) -> None:
        """Start a step."""
        self._durations = ()
        patience = self.policy.patience  # None if the policy never waits for the head
        if patience is not None:
            self._durations = patience.durations

    def __iter__(self) -> Iterator[Choice]:
        """Choose an action or a pair, send its position to the followers and yield it.

        Raises:
            TransportTimeout: No action is ready, and nothing arrived for `timeout_s`.
        """
        progress = self.policy.progress
        row = progress.row
        position_of = self.table.positions
        ahead = self.run_ahead
        for exchange in self.table.exchanges:
            for transfer in exchange.inputs:
                # A policy's table contains no bypasses, so add the bypasses to the required inputs.
                if transfer.message.kind in ("P", "G"):
                    progress.require(exchange.action, transfer.message)
        if ahead is not None:
            # Only peers over ipc send launch notices.
            wires = self.transport.stats().wires.values()
            progress.hears_launches = all(wire == "ipc" for wire in wires)
            # An evaluation may still be running on the device. Wait for its actions to
            # complete, because they are not in this table.
            ahead.wait_until(0)
            ahead.listen(self.transport.wake)
        try:
            number = 0
            while progress.num_left:
                indices = self._choose()
                positions = [position_of[row[index]] for index in indices]
                for decision in self._decisions(positions):
                    for follower in self.followers:
                        # Keep the message on the CPU, so that reading the decision does not wait
                        # for a device.
                        choice = torch.tensor([decision], dtype=torch.int32)
                        message = Message("D", 0, number)
                        self.transport.isend(choice, follower, message)
                    number += 1
                begin_s = time.perf_counter()
                if len(positions) == 1:
                    yield positions[0]
                else:
                    forward, backward = positions
                    yield forward, backward
                if ahead is None:
                    self._ended(indices, time.perf_counter() - begin_s)
                else:
                    self._running.append(indices)
                # On a device, the action has only been launched, but actions that need
                # it run after it in the same stream.
                for index in indices:
                    progress.finished(index)
            # Nothing waits for the last action to complete, so leave one action
            # running.
            while len(self._running) > 1:
                self._wait()
        finally:
            if ahead is not None:
                ahead.listen(None)

    def _decisions(self, positions: Sequence[int]) -> Sequence[int]:
        """Return the decisions to send to followers for an action or a pair."""
        if len(positions) == 1:
            return positions
        # An offset marks a pair's forward action. Its backward action follows as the next decision.
        forward, backward = positions
        return forward + len(self.policy.progress.row), backward

    def handed(self, message: Message) -> None:
        """Mark a tensor as arrived, which may make its consumer ready."""
        self._note([message])

    def _choose(self) -> Sequence[int]:
        self._idle_s = time.perf_counter()
        self._sleep(0.0)
        # If the policy looks ahead, choose while the last action is still running on
        # the device, so that the device is not idle during the launch. Otherwise,
        # choose once that action is complete.
        while len(self._running) >= AHEAD:
            self._wait()
        self.policy.progress.began()
        while self._running and not self.policy.looks_ahead():
            self._wait()
        while True:
            # Convert the wait to seconds at this step's pace. Until an action has
            # completed, the pace is unknown, so do not wait.
            units = self.policy.wait()
            patience_s = 0.0
            if units and self._ran_units:
                patience_s = units * self._ran_s / self._ran_units
            left_s = self._idle_s + patience_s - time.perf_counter()
            if left_s > 0:
                self._sleep(left_s)
                continue
            index = self.policy.choose()
            if index is not None:
                return self.policy.with_partner(index)
            self._wait()

    def _wait(self) -> None:
        """Sleep until a message arrives or an action completes."""
        deadline_s = time.perf_counter() + self.timeout_s
        while not self._sleep(deadline_s - time.perf_counter()):
            # With a device, `_sleep` may return early: the wake-up may be for a completion that was
            # already recorded.
            if self.run_ahead is None or time.perf_counter() >= deadline_s:
                raise TransportTimeout(self._missing())

    def _sleep(self, timeout_s: float) -> bool:
        """Sleep for up to `timeout_s`; return whether a message arrived or an action completed."""
        messages: Sequence[Message] = []
        try:
            messages = self.transport.poll(max(0.0, timeout_s))
        except (PeerClosed, PeerDied):
            if self.policy.progress.num_outstanding or not self._running:
                raise
            # Peers that have finished their part of the step may exit while this rank only
            # waits for its own device.
            assert self.run_ahead is not None
            self.run_ahead.wait_until(len(self._running) - 1)
        self._note(messages)
        ended_s: Sequence[float] = ()
        if self.run_ahead is not None:
            ended_s = self.run_ahead.ended_s()
        for took_s in ended_s:
            self._ended(self._running.popleft(), took_s)
            self._idle_s = time.perf_counter()
        return bool(messages or ended_s)

    def _ended(self, indices: Sequence[int], took_s: float) -> None:
        """Add the time and cost of a completed action or pair."""
        self._ran_s += took_s
        if self._durations:
            self._ran_units += sum(self._durations[index] for index in indices)

    def _note(self, messages: Sequence[Message]) -> None:
        progress = self.policy.progress
        for part in messages:
            assert part.kind != "D", "a leader receives no decisions"
            # To the policy, all tensors in a hand-over are one message, except for
            # bypasses.
            message = part._replace(header=False)
            if part.kind not in ("P", "G"):
                message = message._replace(part=0)
            if self._is_whole(message):
                if message.launched:
                    progress.launched(message.tensor)
                else:
                    progress.arrived(message)
            elif part.header and self._is_whole(message.notice):
                # A header is also a launch notice.
                progress.launched(message)

    def _is_whole(self, message: Message) -> bool:
        """Count a message's tensor or launch notice; return whether it was the last one."""
        number = self.num_parts[message.kind]
        if number > 1:
            self._arrived[message] += 1
        return number == 1 or self._arrived[message] == number

    def _missing(self) -> str:
        progress = self.policy.progress
        rank = f"rank {dist.get_rank()} (pipeline rank {self.table.rank})"
        label = self.table.schedule.label
        if self._running:
            running = [str(progress.row[index]) for index in self._running[0]]
            return (
                f"{rank}: {' and '.join(running)} in {label} did not finish on its device "
                f"within {self.timeout_s:g} s"
            )
        positions = self.table.positions
        remaining = []
        for index, action in enumerate(progress.row):
            if not progress.done[index]:
                remaining.append(action)
        head = min(remaining, key=lambda action: positions[action])
        exchange = self.table.exchanges[positions[head]]
        needs = ""
        if exchange.inputs:
            needs = f", which needs {exchange.inputs[0].message}"
        return (
            f"{rank} cannot run any of its {len(remaining)} remaining actions in {label}: nothing "
            f"arrived for {self.timeout_s:g} s; the first one in the table is {head}{needs}"
        )


@dataclass
class LedOrder(Order):
    """Follows the leader's decisions: one message for an action, two messages for a pair."""

    transport: Transport
    leader: int
    """The leader's global rank."""
    timeout_s: float

    def expected(self) -> list[Expected]:
        """Return a decision message for each action: int32, shape `(1,)`."""
        expected = []
        for number in range(len(self.table.exchanges)):
            message = Message("D", 0, number)
            decision = Expected(
                self.leader,
                message,
                (1,),
                torch.int32,
            )
            expected.append(decision)
        return expected

    def __iter__(self) -> Iterator[Choice]:
        """Receive and yield the leader's decisions.

        Raises:
            TransportError: A decision timed out, or the leader failed.
        """
        # The micro-batch field contains the decision's number, because decisions may arrive early.
        num_actions = len(self.table.exchanges)
        forward = None
        for number in range(num_actions):
            message = Message("D", 0, number)
            choice = self.transport.recv(self.leader, message, self.timeout_s)
            position = int(choice.item())
            if position >= num_actions:
                forward = position - num_actions
            elif forward is not None:
                yield forward, position
                forward = None
            else:
                yield position


# -- how far the host runs ahead -------------------------------------------------------------------


# A host that launched a whole step at once would need memory for every message in the
# step, because a tensor used by a copy stream is freed only once the device has reached
# the copy. So each action ends with an event, and the host launches the next action
# only while few actions are unfinished.
class RunAhead:
    """Counts and times the actions that a device has finished. Call it from one thread only."""

    def __init__(
        self,
        backend: Device,
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        self._backend = backend
        self._device = device
        self._timeout_s = timeout_s
        # The start of the action being launched.
        self._began: torch.Event | None = None
        # Unfinished actions, oldest first, each with a future for its duration on the device, in
        # seconds.
        self._unfinished: deque[tuple[object, Future[float]]] = deque()
        self._ended_s: list[float] = []
        self._wake: Callable[[], None] | None = None
        # For each action: its start and end events, the future for its duration, and
        # the function to call at its end; None stops the thread.
        self._launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A thread waits for the events, because waiting for a device has no time-out.
        # The thread is a daemon, so a hanging device does not keep the process from
        # exiting.
        self._thread = threading.Thread(
            target=self._watch,
            name="megatron-ext ends",
            daemon=True,
        )
        self._thread.start()

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Keep durations for `ended_s` and call `wake` from another thread when an action ends.

        `wake` is also called when an action fails. Passing None stops both.
        """
        self._wake = wake
        self._ended_s.clear()

    def ended_s(self) -> list[float]:
        """Return the duration of each action completed since the last call, oldest first.

        Raises:
            MegatronExtError: The device failed.
        """
        while self._unfinished:
            _action, took_s = self._unfinished[0]
            if not took_s.done():
                break
            self._note_end()
        ended_s = self._ended_s
        self._ended_s = []
        return ended_s

    def begin(self) -> None:
        """Mark the start of an action."""
        # Record this after the current stream's wait for inputs, because that wait is not part of
        # the action.
        self._began = self._backend.timing_event()
        self._began.record()

    def record(self, action: object) -> torch.Event:
        """Mark the end of an action, after all work in the current stream; return the event."""
        event = self._backend.timing_event()
        took_s = Future[float]()
        event.record()
        self._unfinished.append((action, took_s))
        self._launched.put((self._began, event, took_s, self._wake))
        self._began = None
        return event

    def wait_until(self, unfinished: int) -> None:
        """Sleep until at most this many recorded actions are unfinished.

        Raises:
            TransportTimeout: An action did not finish in time; the device may be waiting for a
                peer.
            MegatronExtError: The device failed.
        """
        # This cannot deadlock: it waits only for this rank's earlier work, and the rest of the
        # table runs after that work anyway (`schedules/search/queues.py` proves that the order
        # completes).
        begin_s = time.perf_counter()
        while len(self._unfinished) > unfinished:
            action, took_s = self._unfinished[0]
            waited_s = time.perf_counter() - begin_s
            try:
                took_s.exception(self._timeout_s - waited_s)
            except FutureTimeout:
                raise TransportTimeout(
                    f"{action} did not finish on {self._device}: waited "
                    f"{time.perf_counter() - begin_s:.1f} s of {self._timeout_s:g} s; it may be "
                    f"waiting for a message from another rank"
                ) from None
            self._note_end()

    def close(self) -> None:
        """Stop the thread once the device has reached every action's events."""
        self._launched.put(None)

    def _note_end(self) -> None:
        action, took_s = self._unfinished[0]
        error = took_s.exception()
        if error is not None:
            raise MegatronExtError(
                f"{action} failed on {self._device}: {error}"
            ) from error
        self._unfinished.popleft()
        if self._wake is not None:
            self._ended_s.append(took_s.result())

    def _watch(self) -> None:
        while (launched := self._launched.get()) is not None:
            begin, end, took_s, wake = launched
            try:
                # A new thread uses the first device by default. Bind inside the loop, so that a
                # failure is reported as the failure of an action.
                self._backend.bind(self._device.index)
                end.synchronize()
                duration_s = 0.0
                if begin is not None:
                    duration_s = 1e-3 * begin.elapsed_time(end)
                took_s.set_result(duration_s)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                took_s.set_exception(error)
            # Do not wake after the step is over: the transport may already be closed.
            is_step_over = wake is not self._wake
            if wake is not None and not is_step_over:
                # If the transport has failed, the step reports the error.
                with suppress(MegatronExtError):
                    wake()
