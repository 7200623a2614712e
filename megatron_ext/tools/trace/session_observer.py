"""Reports the actions of executor and transport to this process's recorder and watchdog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.runtime.executor import Executed, Observer, num_out_of_order
from megatron_ext.runtime.lengths import item_size
from megatron_ext.tools.trace import session
from megatron_ext.tools.trace.activations import kept_bytes
from megatron_ext.tools.trace.activity import made_by
from megatron_ext.tools.trace.records import ACTION_NAMES, size_fields
from megatron_ext.transport.observed import ObservedTransport, TransportObserver

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.transport.base import Expected, Transport
    from megatron_ext.transport.observed import WaitsFor

__all__ = ["observed_transport", "observers", "size_notes"]


def observers(compute: StageCompute) -> list[Observer]:
    """Return the observers of a training step's actions: the session of this process, if any."""
    found = session.current()
    return [] if found is None else [_ActionObserver(found, compute)]


def observed_transport(transport: Transport) -> Transport:
    """Return a transport that reports its messages to the session of this process, if any."""
    found = session.current()
    if found is None:
        return transport
    if found.recorder is not None:
        found.recorder.connected(transport.stats().wires)
    return ObservedTransport(transport, _MessageObserver(found))


def size_notes() -> Callable[[int, Any], None] | None:
    """Return what notes the lengths of micro-batches in the trace; None if none is recorded now."""
    found = session.current()
    recorder = None if found is None else found.recorder
    if recorder is None or not recorder.active:
        return None

    def note(microbatch: int, item: Any) -> None:
        size = item_size(item)
        if size is not None:
            recorder.notes |= size_fields(microbatch, size.tokens, size.pairs)

    return note


class _ActionObserver(Observer):
    """Observes the actions of one step."""

    def __init__(self, observing: session.Session, compute: StageCompute) -> None:
        self._activity = observing.activity
        self._recorder = observing.recorder
        self._bytes_by_stage = observing.activation_bytes
        self._compute = compute
        self._table = compute.table
        self._began: Any = None

    def begin_action(self, action: Action) -> None:
        """Report the action that begins."""
        self._activity.now(f"runs {action}")
        recorder = self._recorder
        self._began = recorder.stamp() if recorder is not None and recorder.active else None

    def end_action(self, position: int, action: Action) -> None:
        """Record the span of an action, and the activations of a stage's first forward."""
        recorder = self._recorder
        if recorder is None or self._began is None:
            return
        stage, kind, microbatch = action
        chunk = self._table.schedule.placement.chunk_of(stage)
        about = {
            "microbatch": microbatch,
            "model_chunk": chunk,
            "stage": stage,
            "pp_rank": self._table.rank,
        }
        recorder.add(ACTION_NAMES["F" if kind == "R" else kind], self._began, about)
        if kind in ("F", "R") and stage not in self._bytes_by_stage:
            saved = self._compute.saved_tensors(stage, microbatch)
            if saved is not None:
                model = self._compute.call.chunks[chunk]
                self._bytes_by_stage[stage] = kept_bytes(saved[1], model)

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Note how far the step left the table's order."""
        if self._recorder is not None and self._recorder.active:
            self._recorder.notes["out_of_order"] = num_out_of_order(executed)


class _MessageObserver(TransportObserver):
    """Observes the messages of one transport, in and between steps."""

    def __init__(self, observing: session.Session) -> None:
        self._activity = observing.activity
        self._recorder = observing.recorder
        self._outstanding: dict[Message, int] = {}
        """By outstanding message: its sender."""
        self._began: Any = None

    def begin_messages(self, expected: Sequence[Expected]) -> None:
        """Register the expected messages."""
        self._outstanding = {item.message: item.source for item in expected}

    def begin_send(self, message: Message, target: int) -> None:
        """Report that the rank may wait for room."""
        self._begin(f"sends {made_by(message)} to rank {target}", [(target, "room")])

    def end_send(self, message: Message, target: int, num_bytes: int) -> None:
        """Record a send."""
        name = "weights" if message.kind == "W" else "send"
        self._record(name, {"to": target, **_about(message), "bytes": num_bytes})

    def begin_receive(self, message: Message, source: int) -> None:
        """Report the sender that the rank waits for."""
        self._begin("waits", [(source, made_by(message))])

    def end_receive(self, message: Message, source: int, num_bytes: int, waited_s: float) -> None:
        """Record a receive, and what of it was waiting."""
        recorder, began = self._recorder, self._began
        if recorder is not None and began is not None:
            end = recorder.stamp()
            if message.kind == "W":
                recorder.add("weights", began, {"from": source, "bytes": num_bytes}, end)
            else:
                waited_ns = round(1e9 * waited_s)
                recorder.received(began, end, waited_ns, source, _about(message), num_bytes)
        self._outstanding.pop(message, None)
        self._activity.now("goes on")

    def begin_wait(self, what: WaitsFor) -> None:
        """Report the events that would end the wait."""
        if what == "slot":
            self._begin("waits until what it sent is taken")
            return
        waits = [(source, made_by(message)) for message, source in self._outstanding.items()]
        self._begin("waits", waits)

    def end_wait(self, what: WaitsFor, arrived: Sequence[Message]) -> None:
        """Record a wait, and the message that ended it."""
        about: dict[str, Any] = {"cause": what}
        if arrived and arrived[0] in self._outstanding:
            about |= {"on": self._outstanding[arrived[0]], **_about(arrived[0])}
        self._record("wait", about)
        self.arrived(arrived)
        self._activity.now("goes on")

    def arrived(self, messages: Sequence[Message]) -> None:
        """Note what is here: it is not waited for any more, taken or not."""
        for message in messages:
            self._outstanding.pop(message, None)

    def _begin(self, what: str, waits_for: Sequence[tuple[int, str]] = ()) -> None:
        self._activity.now(what, waits_for)
        recorder = self._recorder
        self._began = recorder.stamp() if recorder is not None and recorder.active else None

    def _record(self, name: str, about: dict[str, Any]) -> None:
        if self._recorder is not None and self._began is not None:
            self._recorder.add(name, self._began, about)


def _about(message: Message) -> dict[str, Any]:
    if message.kind == "W":
        return {}  # no message of the pipeline
    about: dict[str, Any] = {
        "for": message.kind, "stage": message.stage, "microbatch": message.microbatch,
    }  # fmt: skip
    if message.header:
        return about | {"part": "header"}
    return about | {"part": message.part} if message.part else about
