"""The observer behind `--trace`, `--hang-timeout` and spans in Megatron's telemetry."""

from __future__ import annotations

import atexit
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext import devices
from megatron_ext.config.sizes import layout_text
from megatron_ext.config.stages import batches_of
from megatron_ext.errors import ScheduleError
from megatron_ext.observer import Executed, Observer
from megatron_ext.runtime.executor import num_out_of_order
from megatron_ext.runtime.lengths import item_size
from megatron_ext.schedules.generators.catalog import base_table, generate
from megatron_ext.tracing import telemetry
from megatron_ext.tracing.hang import OUTSIDE, RankState, Watchdog, made_by
from megatron_ext.tracing.recorder import DeviceClock, HostClock, Recorder
from megatron_ext.tracing.records import ACTION_NAMES, Header, directory_name
from megatron_ext.upstream.releases import core_version
from megatron_ext.upstream.signatures import megatron_arguments
from megatron_ext.version import __version__, installed

if TYPE_CHECKING:
    from megatron_ext.config.active import Active
    from megatron_ext.message import Message
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Action, Kind, Schedule
    from megatron_ext.transport.base import Expected
    from megatron_ext.transport.observed import WaitsFor

_SETTINGS = (
    "pipeline_costs", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "micro_batch_size", "global_batch_size", "num_layers",
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "num_experts",
    "params_dtype", "recompute_granularity", "overlap_grad_reduce", "overlap_param_gather",
    "use_distributed_optimizer", "sequence_parallel",
)  # fmt: skip
"""Arguments of Megatron that may explain a duration; those of ours are in the configuration."""

_OFFLOADING = "cpu_offloading", "fine_grained_activation_offloading"
"""Settings of a model whose activations leave the device."""
_CAUSES = {"D": "leader", "C": "credit"}
"""By kind of message: the cause of a wait for it, where that is no input."""
_STUCK_S = 5.0
"""After an error, time for the device to finish what the trace of its step needs."""
_COLLECTIVES = {"reduce": "the reduction of gradients", "optimizer": "the optimizer step"}


def subscribe(found: Active) -> None:
    """Add the observer that a configuration or Megatron's telemetry wants, once.

    Call it before the first step, when Megatron's process groups exist.
    """
    has_table = found.pipeline is not None or found.job is not None  # else Megatron has the spans
    has_spans = has_table and telemetry.is_on()
    wanted, timeout_s = found.config.tracing, found.config.hang_timeout_s
    if not (has_spans or wanted is not None or timeout_s is not None):
        return
    if any(isinstance(observer, Session) for observer in found.observers):
        return
    session = Session(found)
    session.has_spans = has_spans
    if timeout_s is not None:
        session.watchdog = Watchdog(lambda: session.state, timeout_s)
    device = devices.current()
    clock = HostClock() if device.is_host else DeviceClock(device)
    session.recorder = Recorder(lambda: _identity(found), clock, wanted)
    found.observers.append(session)
    atexit.register(session.close)  # a run that ends without deconfigure closes its file too


class Session(Observer):
    """Observes the training steps of this process, their actions and their messages."""

    def __init__(self, configuration: Active) -> None:
        self.recorder = Recorder(lambda: _identity(configuration), sampling=None)
        self.watchdog: Watchdog | None = None
        self.has_spans = False
        """Whether Megatron's telemetry has spans of actions and messages."""
        self._configuration = configuration
        is_forward = configuration.job is not None and configuration.job.role == "forward"
        self._entered = math.inf if is_forward else 0.0
        """Collectives that the rank has entered; a forward rank takes part in none."""
        self.state = RankState(-1, entered=self._entered)
        """What the rank does now; the watchdog reads it."""
        self._activation_bytes: dict[tuple[int, int], int] = {}
        """By stage and slice: what a forward keeps for its backward, once it was measured."""
        self._compute: StageCompute | None = None
        self._outstanding: dict[Message, int] = {}
        """By outstanding message: its sender."""
        self._began: list[tuple[Any, Callable[[Mapping[str, Any]], None] | None]] = []
        """When what is under way began, one inside the other, None if it is not recorded; and what
        ends its span of Megatron's telemetry."""
        self._collectives = 0
        """Collectives under way, one inside the other."""
        self._number = 0
        """Of the training step, counted over all resumed runs."""

    def close(self) -> None:
        """End the file of the recorder and the threads of the watchdog."""
        atexit.unregister(self.close)  # which keeps the configuration
        self.end_iteration()
        self.recorder.close()
        if self.watchdog is not None:
            self.watchdog.stop()

    # Training steps.

    def begin_iteration(self, num_microbatches: int) -> None:
        """Start to watch and to record."""
        # Megatron skips iterations, and may run one again. Bridge's number, and that of a program
        # which gives one, is in force; a program that gives none is counted from its start.
        last, given = self._number, self._configuration.iteration
        counted = getattr(megatron_arguments(), "curr_iteration", last)
        self._number = 1 + (counted if given is None else given)
        if last == self._number:
            self.recorder.notes["failed"] = True  # Megatron's rerun state machine has discarded it
        self.end_iteration()  # nothing else does where the optimizer is none of Megatron's
        self._report("begins a step")  # before the watchdog, which counts from here
        if self.watchdog is not None:
            self.watchdog.start()
        self.recorder.begin_iteration(self._number)
        self.recorder.notes["microbatches"] = num_microbatches  # --rampup-batch-size changes it

    def end_schedule(self) -> None:
        """Stop to watch: an optimizer of Megatron's goes on with it, and others report nothing."""
        self._report(OUTSIDE)

    def end_iteration(self) -> None:
        """Write what the step has left."""
        self._compute, self._collectives = None, 0
        failed = bool(self._began)  # with an error, what is under way never ends
        while self._began:
            if (end := self._began.pop()[1]) is not None:
                end({})
        try:
            if self.recorder.active:
                notes = self.recorder.notes
                if failed:
                    notes["failed"] = True
                notes["memory_bytes"] = devices.current().peak_memory_bytes()
                if kept := self._activation_bytes:
                    stages = {stage for stage, _ in kept}
                    notes["activation_bytes"] = sum(kept.values()) // len(stages)
                self._now("waits until its device has finished the step")
                # The error may be that the device never ends: waiting for it would hide that.
                self.recorder.end_iteration(_STUCK_S if failed else None)
        finally:
            self._report(OUTSIDE)  # not watched, but published if another rank raises an alarm

    def begin_collective(self, name: str) -> None:
        """Report a collective: the rank waits for all that are not in it."""
        self._collectives += 1  # an optimizer calls those that it chains
        if self._collectives == 1:
            self._entered += 1
            # The optimizer ends the step, so it is watched behind the schedule, too.
            report = self._report if name == "optimizer" else self._now
            report(f"is in {_COLLECTIVES[name]}", in_collective=True)
            self._begin()

    def end_collective(self, name: str) -> None:
        """Record a collective. The outermost optimizer's step ends the training step."""
        self._collectives -= 1
        if self._collectives:
            return
        self._end(name, {})
        if name == "optimizer":
            self.end_iteration()

    # Actions.

    def read(self, microbatch: int, item: Any) -> None:
        """Note the length of a micro-batch in the trace."""
        if self.recorder.active and (size := item_size(item)) is not None:
            self.recorder.notes.setdefault("lengths", {})[microbatch] = size

    def begin_step(self, compute: StageCompute) -> None:
        """Keep what holds the activations of a step."""
        self._compute = compute

    def begin_action(self, action: Action) -> None:
        """Report the action that begins."""
        self._now(f"runs {action}")
        self._begin(ACTION_NAMES[action.kind])

    def end_action(self, position: int, action: Action) -> None:
        """Record an action, and the activations of a stage's first forward."""
        stage, kind, microbatch, part = action
        about = {"microbatch": microbatch, "stage": stage} | ({"slice": part} if part else {})
        self._end(ACTION_NAMES[kind], about)
        compute = self._compute
        if compute is None:  # Megatron's own schedule, whose transport may report nothing
            self._now(f"has run {action} and exchanges tensors")
        elif kind in ("F", "R") and (stage, part) not in self._activation_bytes:
            saved = compute.saved_tensors(action)
            if saved is not None:
                chunk = compute.table.schedule.placement.chunk_of(stage)
                self.made(stage, saved[1], compute.call.chunks[chunk], part)

    def begin_exchange(self) -> None:
        """Stamp the stream that exchanges the tokens of experts."""
        self._begin()

    def end_exchange(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Record the exchange."""
        self._end("exchange", {"of": kind, "microbatch": microbatch, "stage": stage})

    def made(
        self, stage: int, outputs: Sequence[Any], model: torch.nn.Module, part: int = 0
    ) -> None:
        """Measure what a stage's first recorded forward, or one of a slice, keeps."""
        # To read what Megatron has moved to the host would bring it back, and its backward fails.
        config = getattr(model, "config", None)
        offloads = any(getattr(config, name, False) for name in _OFFLOADING)
        if self.recorder.active and not offloads and (stage, part) not in self._activation_bytes:
            self._activation_bytes[stage, part] = kept_bytes(outputs, model)

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Note how far the step left the table's order."""
        self._compute = None
        if self.recorder.active:
            self.recorder.notes["out_of_order"] = num_out_of_order(executed)

    # Messages, in and between steps.

    def connected(self, wires: Mapping[int, str]) -> None:
        """Note which wire reaches which peer."""
        self.recorder.wires |= wires

    def begin_messages(self, expected: Sequence[Expected]) -> None:
        """Register the expected messages."""
        self._outstanding = {item.message: item.source for item in expected}

    def begin_send(self, message: Message, target: int) -> None:
        """Report that the rank may wait for room."""
        self._now(f"sends {made_by(message)} to rank {target}", [(target, "room")])
        self._begin("send")

    def end_send(self, message: Message, target: int, num_bytes: int) -> None:
        """Record a send."""
        about = {"to": target, **_about(message), "bytes": num_bytes}
        self._end("weights" if message.kind == "W" else "send", about)

    def begin_receive(self, message: Message, source: int) -> None:
        """Report the sender that the rank waits for."""
        self._now("waits", [(source, made_by(message))])
        self._begin("receive")

    def end_receive(self, message: Message, source: int, num_bytes: int, waited_s: float) -> None:
        """Record a receive, and what of it was waiting."""
        began, end_span = self._began.pop()
        about = _about(message)
        received = {"from": source, **about, "bytes": num_bytes}
        if end_span is not None:
            end_span({**received, "waited_s": waited_s})
        recorder = self.recorder
        if recorder.active and began is not None:
            end = recorder.stamp()
            if about:
                on = {"cause": _CAUSES.get(message.kind, "input"), "on": source, **about}
                # The host's wait says nothing about its device's; of the events of that, only the
                # last tells when the message was there.
                arrived = began + round(1e9 * waited_s) if isinstance(began, int) else end
                recorder.add("wait", began, on, arrived)
                began = arrived
            recorder.add("receive" if about else "weights", began, received, end)
        self.arrived([message])
        self._now("goes on")

    def begin_wait(self, what: WaitsFor) -> None:
        """Report the events that would end the wait."""
        if what == "slot":
            self._now("waits until what it sent is taken")
        else:
            waits = [(source, made_by(message)) for message, source in self._outstanding.items()]
            self._now("waits", waits)
        self._begin("wait")

    def end_wait(self, what: WaitsFor, arrived: Sequence[Message]) -> None:
        """Record a wait, and the message that ended it."""
        about: dict[str, Any] = {"cause": what}
        if arrived and arrived[0] in self._outstanding:
            about |= {"on": self._outstanding[arrived[0]], **_about(arrived[0])}
        self._end("wait", about)
        self.arrived(arrived)
        self._now("goes on")

    def arrived(self, messages: Sequence[Message]) -> None:
        """Take messages off the outstanding ones."""
        for message in messages:
            self._outstanding.pop(message, None)

    def _now(
        self, what: str, waits_for: Sequence[tuple[int, str]] = (), in_collective: bool = False
    ) -> None:
        # Evaluations and saves take their time: only training steps are watched.
        if self.state.what != OUTSIDE:
            self._report(what, waits_for, in_collective)

    def _report(
        self, what: str, waits_for: Sequence[tuple[int, str]] = (), in_collective: bool = False
    ) -> None:
        # One assignment, without a lock: the watchdog never sees half of a change.
        self.state = RankState(
            -1, what, waits_for, in_collective, time.monotonic(), entered=self._entered
        )

    def _begin(self, span: str = "") -> None:
        opened = telemetry.begin(span) if span and self.has_spans else None
        self._began.append((self.recorder.stamp() if self.recorder.active else None, opened))

    def _end(self, name: str, about: Mapping[str, Any]) -> None:
        began, end_span = self._began.pop()
        if began is not None:
            self.recorder.add(name, began, about)
        if end_span is not None:
            end_span(about)


def kept_bytes(outputs: Iterable[torch.Tensor | None], model: torch.nn.Module) -> int:
    """Return the bytes of all storages that the graph of the outputs keeps, without weights.

    Hooks for saved tensors would be simpler, but with them a backward sees copies of the
    parameters, without the attributes that Megatron sets on them.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    roots = (output.grad_fn for output in outputs if output is not None)
    waiting: list[Any] = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        # Torch's nodes have an attribute for each tensor that they keep, custom ones a tuple.
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for name in names or ["saved_tensors"]:
            value = getattr(node, name, None)
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in weights:
                        found[storage.data_ptr()] = storage.nbytes()
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        waiting.extend(following)
    return sum(found.values())


def _about(message: Message) -> dict[str, Any]:
    if message.kind == "W":
        return {}  # no message of the pipeline
    kind, stage, microbatch = message[:3]
    others = {name: getattr(message, name) for name in ("slice", "part", "header")}
    about = {"for": kind, "stage": stage, "microbatch": microbatch}
    return about | {name: value for name, value in others.items() if value}


def _identity(found: Active) -> tuple[Path, Header, Schedule | None]:
    """Return what `Recorder` asks for; needs Megatron's groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    job, pipeline = found.job, found.pipeline
    args = megatron_arguments() or getattr(found.host, "arguments", None)
    sizes = (
        groups.get_data_parallel_world_size(with_context_parallel=True),
        groups.get_pipeline_model_parallel_world_size(),
        groups.get_tensor_model_parallel_world_size(),
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    place = (
        groups.get_data_parallel_rank(with_context_parallel=True),
        groups.get_pipeline_model_parallel_rank(),
        groups.get_tensor_model_parallel_rank(),
    )
    if job is not None:  # forward ranks are the first half of the pipeline
        rank, num_ranks, place = job.rank, job.ranks.num_ranks, (place[0], job.position, place[2])
        sizes = sizes[0], 2 * sizes[1], job.ranks.tp
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            settings[name] = value if isinstance(value, bool | int | float) else str(value)
    if (layout := layout_text(getattr(args, "pipeline_model_parallel_layout", None))) is not None:
        settings["pipeline_model_parallel_layout"] = layout
    settings |= {
        "pipeline_schedule": "Megatron's own" if job is None else "fbd",
        "transport": "torch" if job is None else found.config.wire,
        "device": devices.current().name,
        # Ranks that share CPUs wait for each other: forecasts have to know.
        "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "megatron_ext": __version__,
        "megatron-core": core_version() or "unknown",  # a tree on PYTHONPATH goes first
        "torch": installed("torch") or "unknown",
        "python": platform.python_version(),
    }
    if (carried := pipeline or found.transport_only) is not None:
        settings["transport"] = carried.transport
    if pipeline is not None:  # includes settings that other flags imply
        settings["pipeline_schedule"] = pipeline.name
        settings["stash_ratio"] = pipeline.config.stash_ratio
        settings["pairs"] = pipeline.config.pairs
        if pipeline.dynamic is not None:
            settings["dpp_policy"] = pipeline.dynamic.policy
            settings["dpp_extra_activations"] = pipeline.dynamic.margin
    try:  # ranks of one boot of a host share its clock
        clock = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        clock = socket.gethostname()
    header = Header(
        rank,
        *place,
        sizes=sizes,
        num_ranks=num_ranks,
        host=socket.gethostname(),
        clock=clock,
        clock_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        settings=settings,
        run="/".join(filter(None, found.environment.run)),
    )
    assert found.config.tracing is not None
    own = Path("benchmark") / directory_name(sizes, dynamic=found.config.dynamic is not None)
    # The table is that of all ranks.
    table = _table(found, args) if rank == 0 else None
    return Path(found.config.tracing.directory or own), header, table


def _table(found: Active, args: Any) -> Schedule | None:
    """Return the table of a full batch; None: there is no pipeline, or no table of it."""
    if (carried := found.pipeline or found.transport_only) is not None:
        return carried.full
    pp = 1 if args is None else args.pipeline_model_parallel_size
    if args is None or (pp < 2 and found.job is None):
        return None
    count = batches_of(args, pp, 1).num_microbatches
    if found.job is not None:
        return found.job.schedule(count)
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None)
    try:
        return generate(base_table(chunks), pp, count, chunks)
    except ScheduleError:
        return None  # Megatron runs a schedule that we have no table for
