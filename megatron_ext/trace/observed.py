"""Computation and transport of a rank, with everything that they do told to recorder and watchdog.

Both stand in for what the executor drives, so that the executor knows nothing of traces, and a run
that is not observed pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_ext.schedules.representation.actions import Action
from megatron_ext.schedules.runtime.measured import Measured, StepMeasure
from megatron_ext.trace import session
from megatron_ext.trace.activations import kept_bytes
from megatron_ext.trace.activity import Activity, made_by
from megatron_ext.trace.records import ACTION_NAMES

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules.representation.actions import Kind
    from megatron_ext.schedules.runtime.compute import StageCompute, Tensors
    from megatron_ext.schedules.runtime.split import Progress
    from megatron_ext.trace.recorder import Recorder
    from megatron_ext.transport.base import Expected, Key, Stats, Transport

__all__ = ["observed_compute", "observed_transport"]


def observed_compute(compute: StageCompute) -> StageCompute:
    """Return the computation of a step, observed if anybody wants to know."""
    found = session.current()
    if found is None or compute.call.forward_only:
        return compute
    return _Compute(compute, found)  # type: ignore[return-value]


def observed_transport(transport: Transport) -> Transport:
    """Return a transport, observed if anybody wants to know."""
    found = session.current()
    if found is None:
        return transport
    if found.recorder is not None:
        found.recorder.connected(transport.stats().wires)
    return _Transport(transport, found)


class _Compute:
    """What the executor asks of `StageCompute`."""

    def __init__(self, compute: StageCompute, observer: session.Session) -> None:
        self._compute = compute
        self._activity = observer.activity
        self._recorder = observer.recorder
        self._table = compute.table
        self._placement = compute.table.schedule.placement
        self._rank = compute.table.rank
        self._kept = observer.activation_bytes
        self._order = StepMeasure(compute.table, Measured())
        self.kept = compute.kept
        self.release = compute.release
        self.unfinished = compute.unfinished

    def forward(self, stage: int, microbatch: int, inputs: Tensors, *, is_first: bool) -> Tensors:
        """Run F."""
        with self._span("F", stage, microbatch):
            if self._recorder is None or stage in self._kept or not self._recorder.active:
                return self._compute.forward(stage, microbatch, inputs, is_first=is_first)
            model = self._compute.call.chunks[self._placement.chunk_of(stage)]
            outputs = self._compute.forward(stage, microbatch, inputs, is_first=is_first)
            self._kept[stage] = kept_bytes(outputs, model)
            return outputs

    def backward(self, stage: int, microbatch: int, gradients: Tensors, *, split: bool) -> Tensors:
        """Run B or I."""
        with self._span("I" if split else "B", stage, microbatch):
            return self._compute.backward(stage, microbatch, gradients, split=split)

    def weights(self, stage: int, microbatch: int, progress: Progress | None) -> None:
        """Run W."""
        with self._span("W", stage, microbatch):
            self._compute.weights(stage, microbatch, progress)

    @contextmanager
    def _span(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        self._activity.now(f"runs {stage}{kind}{microbatch}")
        recorder = self._recorder
        if recorder is None or not recorder.active:
            yield
            return
        begin = recorder.stamp()
        yield
        about = {
            "microbatch": microbatch,
            "model_chunk": self._placement.chunk_of(stage),
            "stage": stage,
            "pp_rank": self._rank,
        }
        recorder.add(ACTION_NAMES[kind], begin, about)
        action = Action(stage, kind, microbatch)
        self._order.ran(self._table.positions[action], action, 0.0)
        recorder.notes["out_of_order"] = self._order.into.out_of_order


class _Transport:
    """A transport that tells what it waits for."""

    def __init__(self, transport: Transport, observer: session.Session) -> None:
        self.observed = transport
        self._activity: Activity = observer.activity
        self._recorder: Recorder | None = observer.recorder
        self._outstanding: dict[Key, int] = {}
        self.close = transport.close

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        """Start a step."""
        self._outstanding = {message.key: message.source for message in expected}
        self.observed.begin(expected, slots)

    def isend(self, tensor: torch.Tensor, target: int, key: Key) -> None:
        """Send a tensor."""
        self._activity.now(f"sends {made_by(key)} to rank {target}", [(target, "room")])
        recorder = self._recorder
        if recorder is None or not recorder.active:
            self.observed.isend(tensor, target, key)
            return
        begin = recorder.stamp()
        size = tensor.nbytes
        self.observed.isend(tensor, target, key)
        name = "send" if key.kind != "W" else "weights"
        recorder.add(name, begin, {"to": target, **_about(key), "bytes": size})

    def recv(self, source: int, key: Key, timeout_s: float) -> torch.Tensor:
        """Receive a tensor; what of that was waiting is told by the transport."""
        self._activity.now("waits", [(source, made_by(key))])
        recorder = self._recorder
        if recorder is None or not recorder.active:
            tensor = self.observed.recv(source, key, timeout_s)
        else:
            waited_s = self.observed.stats().waited_s
            begin = recorder.stamp()
            tensor = self.observed.recv(source, key, timeout_s)
            end = recorder.stamp()
            waited_ns = round(1e9 * (self.observed.stats().waited_s - waited_s))
            if key.kind != "W":
                recorder.received(begin, end, waited_ns, source, _about(key), tensor.nbytes)
            else:
                recorder.add("weights", begin, {"from": source, "bytes": tensor.nbytes}, end)
        self._outstanding.pop(key, None)
        self._activity.now("goes on")
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Key]:
        """Wait until something has arrived."""
        if timeout_s == 0.0:
            arrived = self.observed.poll(0.0)
            self._forget(arrived)
            return arrived
        waits = ((source, made_by(key)) for key, source in self._outstanding.items())
        self._activity.now("waits", tuple(waits))
        recorder = self._recorder
        if recorder is None or not recorder.active:
            arrived = self.observed.poll(timeout_s)
        else:
            begin = recorder.stamp()
            arrived = self.observed.poll(timeout_s)
            about: dict[str, Any] = {"cause": "input"}
            if arrived and arrived[0] in self._outstanding:
                about |= {"on": self._outstanding[arrived[0]], **_about(arrived[0])}
            recorder.add("wait", begin, about)
        self._forget(arrived)
        self._activity.now("goes on")
        return arrived

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left."""
        self._activity.now("waits until what it sent is taken")
        recorder = self._recorder
        if recorder is None or not recorder.active:
            self.observed.flush(timeout_s)
        else:
            begin = recorder.stamp()
            self.observed.flush(timeout_s)
            recorder.add("wait", begin, {"cause": "slot"})
        self._activity.now("goes on")

    def abort(self, reason: str) -> None:
        """Give the step up."""
        self.observed.abort(reason)

    def stats(self) -> Stats:
        """Return what was done so far."""
        return self.observed.stats()

    def _forget(self, arrived: Sequence[Key]) -> None:
        """Note what is here: it is not waited for any more, taken or not."""
        for key in arrived:
            self._outstanding.pop(key, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observed, name)


def _about(key: Key) -> dict[str, Any]:
    if key.kind == "W":
        return {}  # no message of the pipeline
    about: dict[str, Any] = {"for": key.kind, "stage": key.stage, "microbatch": key.microbatch}
    if key.part:
        about["part"] = key.part
    return about
