"""Terminates a hanging job and names the rank that blocks it.

A thread on each rank checks that the training thread is making progress. If there is no progress
within the time-out, the rank raises an alarm in the job's store. All ranks then publish their
states there. From these states, one rank works out which rank waits for which, and all ranks stop
with that verdict. Calls to the store may block forever, so a second thread terminates the rank if
the store does not answer.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from psutil import Process

from megatron_ext.config import active
from megatron_ext.errors import HangError
from megatron_ext.upstream import cause

if TYPE_CHECKING:
    from megatron_ext.message import Message

_LOG = logging.getLogger(__name__)
_ANSWER_S = 5.0
"""Time for ranks to publish their states, and time for an error to stop a process."""
_MAX_NAMED = 4
"""Maximum number of awaited ranks in a message."""
_SIGNAL = signal.SIGRTMIN + 7
"""Interrupts the training thread's system calls. No other code uses this signal."""

_WRAPPER_FOLDERS = ("/torch/", "/megatron_ext/tracing/", "/megatron_ext/devices/")
"""A frame of these is passed over: the line that called it says more about what a rank does."""

OUTSIDE = "is between training steps"
_SILENT = "its process is gone, stopped, or cut off from the network"


class RankState(NamedTuple):
    """A rank's current activity, as reported by that rank."""

    rank: int
    activity: str = OUTSIDE
    """Continues a sentence that begins with `rank 3`: `runs 5F3`, `is in the optimizer step`."""
    waits_for: Sequence[tuple[int, str]] = ()
    """(global rank, awaited item) for the events that can unblock the rank; any one suffices."""
    in_collective: bool = False
    """Whether the rank waits for all ranks that have not entered the same collective."""
    since_s: float = 0.0
    """In a published state, the duration of the activity; within the process, its start time."""
    where: str = ""
    """The source line that the training thread is executing."""
    entered: float = 0
    """Number of collectives in training steps that the rank has entered; infinite if it never
    enters any."""
    runs_collective: bool = False
    """Whether the training thread is inside a torch.distributed call that only other ranks can
    unblock. On a device, such calls return immediately, so this is False."""

    def __str__(self) -> str:
        """Return the state in one line."""
        doing = self.activity
        if self.waits_for:
            named = []
            for rank, awaited in self.waits_for[:_MAX_NAMED]:
                named.append(f"{awaited} of rank {rank}")
            num_unnamed = len(self.waits_for) - _MAX_NAMED
            if num_unnamed > 0:
                named.append(f"{num_unnamed} more")
            doing = f"waits for {' or '.join(named)}"
        return f"rank {self.rank} {doing} {self.lasting}"

    @property
    def lasting(self) -> str:
        """The activity's duration, and the training thread's line if known."""
        lasting = f"for {self.since_s:.1f} s"
        if self.where:
            lasting += f", at {self.where}"
        return lasting


def made_by(message: Message) -> str:
    """Return the action that produces a message, for example `5B3`, or the message's text."""
    kind, stage, microbatch, part = message[:4]
    if kind not in ("F", "B"):
        return str(message)
    # A message names the stage that needs it. Activations come from the previous stage, and
    # gradients come from the next stage.
    producer = stage - 1
    if kind == "B":
        producer = stage + 1
    if part:
        return f"{producer}{kind}{microbatch}.{part}"
    return f"{producer}{kind}{microbatch}"


class Verdict(NamedTuple):
    """The cause of a hang."""

    chain: str
    """`rank 2 waits for 5B3 of rank 3, which ...`"""
    culprits: Sequence[int]
    """The ranks that all other ranks wait for."""

    @property
    def culprit(self) -> int | None:
        """The rank that all other ranks wait for; None if several wait for each other."""
        if len(self.culprits) != 1:
            return None
        return self.culprits[0]

    @property
    def message(self) -> str:
        """The error text."""
        ranks = ", ".join(str(rank) for rank in self.culprits)
        if len(self.culprits) == 1:
            return f"rank {ranks} holds the job up: {self.chain}"
        return f"ranks {ranks} hold each other up: {self.chain}"


def explain(
    states: Mapping[int, RankState],
    num_ranks: int,
    start: int,
    state_of_silent: Callable[[int], str] = lambda _rank: _SILENT,
) -> Verdict:
    """Follow the chain of waiting ranks to one that does not wait or has not published its state.

    `state_of_silent` describes the process of a rank that has not published its state.
    """
    # Ranks, each waiting for the next; `parts` describes each rank.
    path = [start]
    parts = []
    while True:
        state = states.get(path[-1])
        if state is None:
            parts.append(f"does not answer: {state_of_silent(path[-1])}")
            break
        steps = _steps_from(state, states, num_ranks)
        if not steps:
            parts.append(f"{state.activity} {state.lasting}")
            break
        # Prefer a rank that is not on the path yet. If there is none, the path has
        # become a cycle.
        new_steps = [step for step in steps if step[0] not in path]
        rank, awaited = new_steps[0] if new_steps else steps[0]
        if awaited:
            parts.append(f"waits for {awaited} of rank {rank}")
        else:
            parts.append(f"{state.activity} and waits there for rank {rank}")
        if not new_steps:
            first_of_cycle = path.index(rank)
            cycle = sorted(path[first_of_cycle:])
            parts.append("appears above: these ranks' tables do not match")
            chain = ", which ".join(parts)
            return Verdict(f"rank {start} {chain}", tuple(cycle))
        path.append(rank)
    chain = ", which ".join(parts)
    return Verdict(f"rank {start} {chain}", (path[-1],))


def _steps_from(
    state: RankState,
    states: Mapping[int, RankState],
    num_ranks: int,
) -> list[tuple[int, str]]:
    """Return the ranks that a rank waits for, each with the awaited item, or '' if it is unknown.

    Ranks without a state come first, because they are more likely to be the cause.
    """
    steps = list(state.waits_for)
    if state.in_collective:
        # The rank waits for ranks that have entered fewer collectives and for ranks
        # without a state.
        steps = []
        for other in range(num_ranks):
            if other not in states or states[other].entered < state.entered:
                steps.append((other, ""))
    # A blocking torch.distributed call does not show which ranks it waits for, so infer them.
    if not steps and state.runs_collective:
        silent = [other for other in range(num_ranks) if other not in states]
        candidates = silent + _late_ranks(states, state)
        steps = [(other, "") for other in candidates]
    return sorted(steps, key=lambda step: step[0] in states)


def _late_ranks(states: Mapping[int, RankState], stuck: RankState) -> list[int]:
    """Return the ranks that have not reached the collective in which a rank is stuck.

    These ranks are in the same part of the step, are not waiting and are not in a collective. Ranks
    with the same activity as the stuck rank come first, because tensor-parallel ranks run the same
    actions.
    """
    late = []
    for rank, state in states.items():
        is_waiting = bool(state.waits_for) or state.runs_collective
        is_in_same_part = state.entered == stuck.entered
        is_in_step = state.activity != OUTSIDE
        if is_in_step and is_in_same_part and not is_waiting:
            late.append(rank)

    def order(rank: int) -> tuple[bool, int]:
        has_other_activity = states[rank].activity != stuck.activity
        return has_other_activity, rank

    return sorted(late, key=order)


def process_state(host: str, pid: int) -> str:
    """Describe why a process may not answer, as far as this host can tell."""
    if host != socket.gethostname():
        return (
            f"its process {pid} on {host} is gone, stopped, or cut off from the network"
        )
    try:
        status = Process(pid).status()
    except psutil.NoSuchProcess:
        return f"its process {pid} on {host} is gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process {pid} on {host} is stopped, by SIGSTOP or a debugger"
    if status == psutil.STATUS_ZOMBIE:
        return f"its process {pid} on {host} has ended"
    if status == psutil.STATUS_DISK_SLEEP:
        return f"its process {pid} on {host} is waiting for a device or a file system"
    return f"its process {pid} on {host} is running, but cut off from the network"


def _connected_again(store: Any) -> Any:
    """Return the store for this attempt at the job, over a new connection."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    connection: Any
    if hasattr(store, "clone"):
        connection = store.clone()
    else:
        # Stores in torch 2.7 lack `clone` and do not expose their prefix.
        base = getattr(store, "_underlying_non_prefix_store", store)
        if isinstance(base, TCPStore):
            connection = TCPStore(
                base.host,
                base.port,
                is_master=False,
                wait_for_workers=False,
            )
        else:
            connection = FileStore(base.path)
    # The store may outlive the ranks (torchrun) or an attempt in the same processes (NVRx), so give
    # each attempt a prefix. Otherwise, the next attempt would find the previous attempt's verdict.
    environment = active.Environment.read()
    attempt = str(active.attempt() or 0)
    prefix = "/".join(("megatron_ext/hang", *environment.run, attempt))
    return PrefixStore(prefix, connection)


class Watchdog:
    """The threads that watch this process.

    Args:
        now: Returns the current state, an object that the training thread replaces but never
            modifies.
        timeout_s: Seconds without a state change after which the rank is considered stuck.
        ends_process: Whether to terminate the process if the error is not raised within a few
            seconds. Otherwise, the caller must terminate it.
    """

    def __init__(
        self,
        now: Callable[[], RankState],
        timeout_s: float,
        *,
        ends_process: bool = True,
    ) -> None:
        self._now = now
        self.timeout_s = timeout_s
        self._ends_process = ends_process
        # Short enough to notice a time-out, and alarms from other ranks, without much delay.
        self._period_s = min(_ANSWER_S, timeout_s / 4)
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._verdict: Verdict | None = None

    def start(self) -> None:
        """Start watching the calling thread; do nothing if it is already watched.

        The process groups must exist.
        """
        if self._threads:
            return
        import torch.distributed as dist

        from megatron_ext.disaggregation.worlds import roles_in_force

        default: Any = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        num_ranks = dist.get_world_size()
        job = active.job()
        # In a disaggregated job, torch.distributed contains only the ranks in one role.
        if job is not None:
            default = roles_in_force().store
            rank = job.rank
            num_ranks = job.ranks.num_ranks
        # A store serves one call at a time per connection, and the training thread may be blocked
        # in a call.
        store = _connected_again(default)
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._training = threading.get_ident()
        # Python runs signal handlers in the main thread, but some programs train in a different
        # thread.
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._old_handler = signal.signal(_SIGNAL, self._raise)
        # Use daemons: a thread that is blocked in a call to the store must not keep the process
        # alive.
        self._threads = [
            threading.Thread(
                target=self._watch,
                args=(store, rank, num_ranks),
                name="watchdog",
                daemon=True,
            ),
            threading.Thread(
                target=self._watch_alone,
                args=(rank,),
                name="watchdog",
                daemon=True,
            ),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads."""
        # A thread cannot join itself.
        if not self._threads or threading.current_thread() in self._threads:
            return
        self._stop.set()
        # A thread may be blocked in the store for longer than this; it is a daemon.
        for thread in self._threads:
            thread.join(2 * _ANSWER_S)
        self._threads.clear()
        # Only the main thread may set a signal handler.
        if self._is_main and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._old_handler or signal.SIG_DFL)

    def _watch_alone(self, rank: int) -> None:
        """Terminate this rank if it is stuck and the store does not answer the other thread."""
        # Allow time for the other ranks' states and for the verdict.
        limit_s = self.timeout_s + 2 * self._period_s + 4 * _ANSWER_S
        while not self._stop.wait(self._period_s):
            if self._verdict is None and self._lasts(limit_s):
                chain = f"{self._state(rank)}; the job's store does not answer"
                self._end(rank, Verdict(chain, (rank,)))
                return

    def _watch(self, store: Any, rank: int, num_ranks: int) -> None:
        """Periodically check the training thread and the other ranks' alarms."""
        # A stopped rank cannot publish its state later, so publish its process now, for
        # other ranks to inspect. Do not publish in the training thread: a store that
        # does not answer blocks its callers.
        process = json.dumps([socket.gethostname(), os.getpid()])
        with suppress(RuntimeError):
            store.set(f"process/{rank}", process)
        while not self._stop.wait(self._period_s):
            stuck = self._lasts(self.timeout_s)
            try:
                if stuck:
                    # All ranks check this key once per period.
                    store.set("alarm", str(rank))
                elif not store.check(["alarm"]):
                    continue
                verdict = self._ask(store, rank, num_ranks)
            except RuntimeError as error:  # the store's process may have died
                if not stuck:
                    continue
                reason = str(error).partition("\n")[0]
                chain = f"{self._state(rank)}; other ranks cannot be reached: {reason}"
                verdict = Verdict(chain, (rank,))
            if not self._stop.is_set():
                self._end(rank, verdict)
            return

    def _lasts(self, limit_s: float) -> bool:
        """Return whether a training step has been in its current state for at least `limit_s`."""
        now = self._now()
        duration_s = time.monotonic() - now.since_s
        return now.activity != OUTSIDE and duration_s >= limit_s

    def _ask(self, store: Any, rank: int, num_ranks: int) -> Verdict:
        """Publish this rank's state, collect all ranks' states, and agree on the cause."""
        state = self._state(rank)
        _LOG.error("%s", state)
        store.set(f"state/{rank}", json.dumps(state._asdict()))
        # Only the first rank that gets here explains the hang, so that the log has a single
        # explanation.
        if store.add("first", 1) > 1:
            store.wait(["verdict"], timedelta(seconds=3 * _ANSWER_S))
            verdict_fields = json.loads(store.get("verdict"))
            return Verdict(*verdict_fields)
        states = {rank: state}
        # The other ranks check for an alarm once per period, so wait for one period plus the time
        # that they need to answer.
        deadline = time.monotonic() + self._period_s + _ANSWER_S
        while len(states) < num_ranks and time.monotonic() < deadline:
            missing_ranks = set(range(num_ranks)) - states.keys()
            for other in missing_ranks:
                if store.check([f"state/{other}"]):
                    text = store.get(f"state/{other}").decode()
                    states[other] = RankState(**json.loads(text))
            self._stop.wait(0.1)
        waiting_ranks = []
        for other, its_state in states.items():
            is_in_collective = its_state.in_collective or its_state.runs_collective
            if its_state.waits_for or is_in_collective:
                waiting_ranks.append(other)
        # If no rank waits, start with the rank that raised the alarm.
        alarming_rank = int(store.get("alarm"))
        start = min(waiting_ranks, default=alarming_rank)

        def state_of_silent(silent: int) -> str:
            if not store.check([f"process/{silent}"]):
                return _SILENT
            host, pid = json.loads(store.get(f"process/{silent}"))
            return process_state(host, pid)

        verdict = explain(states, num_ranks, start, state_of_silent)
        _LOG.error("no rank makes progress: %s", verdict.chain)
        store.set("verdict", json.dumps(verdict))
        return verdict

    def _state(self, rank: int) -> RankState:
        """Return this rank's state, with the innermost line outside of torch and this package."""
        where = ""
        # Walk outwards from the innermost frame until a frame is informative.
        frame = sys._current_frames().get(self._training)
        runs_collective = False
        while frame is not None and not where:
            name = frame.f_code.co_filename
            if name.endswith("/torch/distributed/distributed_c10d.py"):
                runs_collective = True
            # The wait for an asynchronous collective over gloo, which is ours.
            is_wait_for_gloo = frame.f_code.co_name == "wait"
            if is_wait_for_gloo and name.endswith("/megatron_ext/devices/cpu.py"):
                runs_collective = True
            if not any(folder in name for folder in _WRAPPER_FOLDERS):
                file_name = name.rpartition("/")[2]
                where = f"{file_name}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        now = self._now()
        return now._replace(
            rank=rank,
            since_s=time.monotonic() - now.since_s,
            where=where,
            runs_collective=runs_collective,
        )

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        """Raise the verdict. Runs in the training thread once that thread executes Python code."""
        if self._verdict is not None:
            raise HangError(self._verdict.message, self._verdict.culprit)

    def _end(self, rank: int, verdict: Verdict) -> None:
        """Raise the verdict in the training thread; if that fails, terminate the process.

        A thread that waits in native code cannot raise the verdict, so its process is terminated
        unless `ends_process` is false.
        """
        self._verdict = verdict
        if self._is_main:
            # The signal also interrupts a system call, during which the thread runs no Python code.
            signal.pthread_kill(self._training, _SIGNAL)
            if self._stop.wait(_ANSWER_S):
                return
        sys.stderr.write(f"[rank {rank}] megatron_ext: error: {verdict.message}\n")
        sys.stderr.flush()
        if not self._ends_process:
            return
        # The error file tells the launcher which rank is to blame.
        error = HangError(verdict.message, verdict.culprit)
        cause.write(cause.of_error(error), verdict.message)
        os._exit(1)  # skip exit handlers: the cause of the hang would block them too
