"""Implements the observer behind `--trace`, `--hang-timeout` and spans in Megatron's telemetry."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.observer import Executed, Observer
from megatron_ext.runtime.executor import num_out_of_order
from megatron_ext.runtime.lengths import item_size
from megatron_ext.tracing import telemetry
from megatron_ext.tracing.hang import OUTSIDE, RankState, Watchdog, made_by
from megatron_ext.tracing.identity import identity_of
from megatron_ext.tracing.recorder import DeviceClock, HostClock, Recorder
from megatron_ext.tracing.records import ACTION_NAMES
from megatron_ext.upstream.signatures import megatron_arguments

if TYPE_CHECKING:
    from megatron_ext.config.active import Active
    from megatron_ext.message import Message
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Action, Kind
    from megatron_ext.transport.base import Expected
    from megatron_ext.transport.observed import WaitsFor

_OFFLOADING = (
    "cpu_offloading",
    "fine_grained_activation_offloading",
)
"""Model settings that move activations from the device to the host."""
_CAUSES = {"D": "leader", "C": "credit"}
"""Message kind -> cause of a wait for it; for all other kinds, the cause is `input`."""
_STUCK_S = 5.0
"""How long the device has after an error to finish the step's traced work."""
_COLLECTIVES = {
    "reduce": "the gradient reduction",
    "optimizer": "the optimizer step",
}


def subscribe(configuration: Active) -> None:
    """Add the observer that a configuration or Megatron's telemetry needs, unless already added.

    Call it before the first step, when Megatron's process groups exist.
    """
    # Without a table, Megatron's own schedule creates these spans itself.
    has_table = configuration.pipeline is not None or configuration.job is not None
    has_spans = has_table and telemetry.is_on()
    sampling = configuration.config.tracing
    timeout_s = configuration.config.hang_timeout_s
    if not (has_spans or sampling is not None or timeout_s is not None):
        return
    for observer in configuration.observers:
        if isinstance(observer, Session):
            return
    session = Session(configuration)
    session.has_spans = has_spans
    if timeout_s is not None:
        # With in-process restarts, do not terminate processes: NVRx terminates the
        # stuck rank and restarts the ranks that wait for it.
        restarts_in_process = active.attempt() is not None
        session.watchdog = Watchdog(
            lambda: session.state,
            timeout_s,
            ends_process=not restarts_in_process,
        )
    device = devices.current()
    clock = HostClock() if device.is_host else DeviceClock(device)
    session.recorder = Recorder(lambda: identity_of(configuration), clock, sampling)
    configuration.observers.append(session)
    # A run that finishes without calling `deconfigure` must close its file too.
    atexit.register(session.close)


class Session(Observer):
    """Observes this process's training steps, with their actions and messages."""

    def __init__(self, configuration: Active) -> None:
        self.recorder = Recorder(lambda: identity_of(configuration), sampling=None)
        self.watchdog: Watchdog | None = None
        self.has_spans = False
        """Whether Megatron's telemetry has spans for actions and messages."""
        self._configuration = configuration
        job = configuration.job
        is_forward = job is not None and job.role == "forward"
        self._entered = math.inf if is_forward else 0.0
        """Number of collectives that the rank has entered; infinite for forward ranks, which enter
        none."""
        self.state = RankState(-1, entered=self._entered)
        """The rank's current activity; the watchdog reads it."""
        self._activation_bytes: dict[tuple[int, int], int] = {}
        """(stage, slice) -> bytes kept from the forward to the backward pass, once measured."""
        self._compute: StageCompute | None = None
        self._outstanding: dict[Message, int] = {}
        """Expected message that has not arrived -> its sender."""
        self._open_spans: list[tuple[Any, telemetry.EndSpan | None]] = []
        """Nested spans in progress: the start stamp (None if not recorded), and the function that
        ends the span in Megatron's telemetry. Plain tuples, because every event in a step creates
        one."""
        self._collectives = 0
        """Nesting depth of the collectives in progress."""
        self._number = 0
        """The training step's number, counted across resumed runs."""

    def close(self) -> None:
        """Close the recorder's file and stop the watchdog's threads."""
        atexit.unregister(self.close)  # atexit would keep the configuration alive
        self.end_iteration()
        self.recorder.close()
        if self.watchdog is not None:
            self.watchdog.stop()

    # Training steps.

    def begin_iteration(self, num_microbatches: int) -> None:
        """Start watching and recording a step."""
        # Do not just count: Megatron skips iterations and may repeat one. Bridge and
        # programs that pass an iteration have stored its number in the configuration.
        previous_number = self._number
        num_done = self._configuration.iteration
        if num_done is None:
            arguments = megatron_arguments()
            num_done = getattr(arguments, "curr_iteration", previous_number)
        self._number = 1 + num_done
        if self._number == previous_number:
            # Megatron's rerun state machine has discarded the previous attempt at this step.
            self.recorder.notes["failed"] = True
        # With an optimizer other than Megatron's, nothing else has completed the previous step.
        self.end_iteration()
        # Report before the watchdog starts, because it measures the time since the last report.
        self._report("begins a step")
        if self.watchdog is not None:
            self.watchdog.start()
        self.recorder.begin_iteration(self._number)
        # Record this in each step, because --rampup-batch-size changes it.
        self.recorder.notes["microbatches"] = num_microbatches

    def end_schedule(self) -> None:
        """Stop watching. Megatron's optimizers resume watching; other optimizers report nothing."""
        self._report(OUTSIDE)

    def end_iteration(self) -> None:
        """Write the step's remaining data."""
        self._compute = None
        # After an error, the collective and span counts are unbalanced.
        self._collectives = 0
        failed = bool(self._open_spans)
        while self._open_spans:
            _, end_span = self._open_spans.pop()
            if end_span is not None:
                end_span({})
        try:
            if self.recorder.active:
                notes = self.recorder.notes
                if failed:
                    notes["failed"] = True
                device = devices.current()
                notes["memory_bytes"] = device.peak_memory_bytes()
                if self._activation_bytes:
                    stages = {stage for stage, _ in self._activation_bytes}
                    total_bytes = sum(self._activation_bytes.values())
                    notes["activation_bytes"] = total_bytes // len(stages)
                self._now("waits until its device has finished the step")
                # After an error, the device may never finish, so do not wait for it
                # forever.
                timeout_s = _STUCK_S if failed else None
                self.recorder.end_iteration(timeout_s)
        finally:
            # The rank is not watched between steps, but publishes this state if another rank raises
            # an alarm.
            self._report(OUTSIDE)

    def begin_collective(self, name: str) -> None:
        """Report that this rank is in a collective, which blocks until all ranks enter it."""
        self._collectives += 1  # chained optimizers nest
        if self._collectives == 1:
            self._entered += 1
            # `end_schedule` has stopped the watchdog; the optimizer resumes it as part of the step.
            report = self._report if name == "optimizer" else self._now
            report(f"is in {_COLLECTIVES[name]}", in_collective=True)
            self._begin()

    def end_collective(self, name: str) -> None:
        """Record a collective. The outermost optimizer also ends the training step."""
        self._collectives -= 1
        if self._collectives:
            return
        self._end(name, {})
        if name == "optimizer":
            self.end_iteration()

    # Actions.

    def read(self, microbatch: int, item: Any) -> None:
        """Record a micro-batch's length in the trace."""
        if not self.recorder.active:
            return
        size = item_size(item)
        if size is not None:
            lengths = self.recorder.notes.setdefault("lengths", {})
            lengths[microbatch] = size

    def begin_step(self, compute: StageCompute) -> None:
        """Keep the object that holds a step's activations and record the slice sizes."""
        self._compute = compute
        slice_sizes = compute.table.schedule.slice_sizes
        if self.recorder.active and slice_sizes:
            self.recorder.notes["slice_sizes"] = slice_sizes

    def begin_action(self, action: Action) -> None:
        """Report which action begins."""
        self._now(f"runs {action}")
        self._begin(ACTION_NAMES[action.kind])

    def end_action(self, position: int, action: Action) -> None:
        """Record an action and, after a stage's first forward pass, the size of its activations."""
        stage, kind, microbatch, slice_index = action
        attributes = {
            "microbatch": microbatch,
            "stage": stage,
        }
        if slice_index:
            attributes["slice"] = slice_index
        self._end(ACTION_NAMES[kind], attributes)
        compute = self._compute
        # Megatron's own schedule exchanges tensors next, and its transport may report nothing.
        if compute is None:
            self._now(f"has run {action} and exchanges tensors")
        elif kind in ("F", "R") and (stage, slice_index) not in self._activation_bytes:
            saved = compute.saved_tensors(action)
            if saved is not None:
                _, outputs = saved
                placement = compute.table.schedule.placement
                chunk = placement.chunk_of(stage)
                model = compute.call.chunks[chunk]
                self.made(stage, outputs, model, slice_index)

    def begin_exchange(self) -> None:
        """Stamp the stream in which experts exchange tokens."""
        self._begin()

    def end_exchange(
        self,
        kind: Kind,
        stage: int,
        microbatch: int,
        layer: int,
    ) -> None:
        """Record the token exchange."""
        attributes = {
            "of": kind,
            "microbatch": microbatch,
            "stage": stage,
            "layer": layer,
        }
        self._end("exchange", attributes)

    def made(
        self,
        stage: int,
        outputs: Sequence[Any],
        model: torch.nn.Module,
        slice_index: int = 0,
    ) -> None:
        """Measure how many bytes a stage's (or slice's) first recorded forward pass keeps."""
        # Skip models that offload: reading a tensor that Megatron has moved to the host would load
        # it back, and Megatron's backward pass would fail.
        config = getattr(model, "config", None)
        offloads = any(getattr(config, name, False) for name in _OFFLOADING)
        is_measured = (stage, slice_index) in self._activation_bytes
        if self.recorder.active and not offloads and not is_measured:
            self._activation_bytes[stage, slice_index] = kept_bytes(outputs, model)

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Record how much the step deviated from the table's order."""
        self._compute = None
        if self.recorder.active:
            self.recorder.notes["out_of_order"] = num_out_of_order(executed)

    # Messages, in and between steps.

    def connected(self, wires: Mapping[int, str]) -> None:
        """Record which wire reaches which peer."""
        self.recorder.wires |= wires

    def begin_messages(self, expected: Sequence[Expected]) -> None:
        """Register the expected messages."""
        self._outstanding = {item.message: item.source for item in expected}

    def begin_send(self, message: Message, target: int) -> None:
        """Report that the rank may wait until the peer has room for the message."""
        activity = f"sends {made_by(message)} to rank {target}"
        self._now(activity, [(target, "room")])
        self._begin("send")

    def end_send(self, message: Message, target: int, num_bytes: int) -> None:
        """Record a send."""
        attributes = {
            "to": target,
            **_attributes_of(message),
            "bytes": num_bytes,
        }
        # Weights are sent between steps, so they are not pipeline traffic.
        name = "weights" if message.kind == "W" else "send"
        self._end(name, attributes)

    def begin_receive(self, message: Message, source: int) -> None:
        """Report which sender the rank waits for."""
        self._now("waits", [(source, made_by(message))])
        self._begin("receive")

    def end_receive(
        self,
        message: Message,
        source: int,
        num_bytes: int,
        waited_s: float,
    ) -> None:
        """Record a receive and the wait at its start."""
        begin, end_span = self._open_spans.pop()
        message_attributes = _attributes_of(message)
        received = {
            "from": source,
            **message_attributes,
            "bytes": num_bytes,
        }
        if end_span is not None:
            end_span({**received, "waited_s": waited_s})
        recorder = self.recorder
        if recorder.active and begin is not None:
            end = recorder.stamp()
            if message_attributes:
                cause = _CAUSES.get(message.kind, "input")
                awaited = {
                    "cause": cause,
                    "on": source,
                    **message_attributes,
                }
                # On a host, split the span where the wait ended. On a device, only the event at the
                # end shows when the message had arrived, so the whole span counts as a wait.
                arrival = end
                if isinstance(begin, int):
                    waited_ns = round(1e9 * waited_s)
                    arrival = begin + waited_ns
                recorder.add("wait", begin, awaited, arrival)
                begin = arrival
            name = "receive" if message_attributes else "weights"
            recorder.add(name, begin, received, end)
        self.arrived([message])
        self._now("continues")

    def begin_wait(self, cause: WaitsFor) -> None:
        """Report the events that the rank waits for."""
        if cause == "slot":
            self._now("waits until a peer receives a message that it sent")
        else:
            waits_for = []
            for message, source in self._outstanding.items():
                waits_for.append((source, made_by(message)))
            self._now("waits", waits_for)
        self._begin("wait")

    def end_wait(self, cause: WaitsFor, arrived: Sequence[Message]) -> None:
        """Record a wait and the message that ended it."""
        attributes: dict[str, Any] = {"cause": cause}
        if arrived and arrived[0] in self._outstanding:
            message = arrived[0]
            attributes["on"] = self._outstanding[message]
            attributes |= _attributes_of(message)
        self._end("wait", attributes)
        self.arrived(arrived)
        self._now("continues")

    def arrived(self, messages: Sequence[Message]) -> None:
        """Remove these messages from the outstanding messages."""
        for message in messages:
            self._outstanding.pop(message, None)

    def _now(
        self,
        activity: str,
        waits_for: Sequence[tuple[int, str]] = (),
        in_collective: bool = False,
    ) -> None:
        # Only training steps are watched, because evaluations and saves may take a long time.
        if self.state.activity != OUTSIDE:
            self._report(activity, waits_for, in_collective)

    def _report(
        self,
        activity: str,
        waits_for: Sequence[tuple[int, str]] = (),
        in_collective: bool = False,
    ) -> None:
        # A single assignment needs no lock: the watchdog reads either the old or the new state.
        self.state = RankState(
            -1,
            activity,
            waits_for,
            in_collective,
            time.monotonic(),
            entered=self._entered,
        )

    def _begin(self, span: str = "") -> None:
        end_span = None
        if span and self.has_spans:
            end_span = telemetry.begin(span)
        begin = None
        if self.recorder.active:
            begin = self.recorder.stamp()
        self._open_spans.append((begin, end_span))

    def _end(self, name: str, attributes: Mapping[str, Any]) -> None:
        # Spans are nested, so end the span that was opened last.
        begin, end_span = self._open_spans.pop()
        if begin is not None:
            self.recorder.add(name, begin, attributes)
        if end_span is not None:
            end_span(attributes)


def kept_bytes(outputs: Iterable[torch.Tensor | None], model: torch.nn.Module) -> int:
    """Return the total size in bytes of the storages that the outputs' graph keeps, except weights.

    Hooks for saved tensors would be simpler, but they pass copies of the parameters to the backward
    pass, and the copies lack the attributes that Megatron sets on parameters.
    """
    # Exclude weights, because they are in memory anyway.
    weight_addresses: set[int] = set()
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        weight_addresses.add(storage.data_ptr())
    # Count each storage once, because several saved tensors may share it.
    bytes_of_storages: dict[int, int] = {}
    for tensor in _saved_tensors(outputs):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in weight_addresses:
            bytes_of_storages[address] = storage.nbytes()
    return sum(bytes_of_storages.values())


def _saved_tensors(outputs: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """Yield the tensors that these outputs' graph nodes keep, possibly several times."""
    # Visit each node once, because several paths may lead to the same node.
    queue: list[Any] = []
    for output in outputs:
        if output is not None and output.grad_fn is not None:
            queue.append(output.grad_fn)
    visited = set(queue)
    while queue:
        node = queue.pop()
        yield from _saved_by(node)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                queue.append(next_node)


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that one graph node keeps."""
    # torch's own nodes have an attribute for each tensor that they keep; custom nodes have a tuple.
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in names or ["saved_tensors"]:
        candidates = getattr(node, name, None)
        if not isinstance(candidates, tuple | list):
            candidates = (candidates,)
        for candidate in candidates:
            if isinstance(candidate, torch.Tensor):
                yield candidate


def _attributes_of(message: Message) -> dict[str, Any]:
    """Return the attributes that identify a message in a trace; empty for weights."""
    if message.kind == "W":  # sent between steps, outside of any pipeline
        return {}
    attributes: dict[str, Any] = {
        "for": message.kind,
        "stage": message.stage,
        "microbatch": message.microbatch,
    }
    for name in ("slice", "part", "header"):
        if value := getattr(message, name):
            attributes[name] = value
    return attributes
