"""Ends a job that hangs, with the name of the rank that holds it up.

A thread of each rank checks whether the training thread makes progress. If it does not for the
time-out, the rank raises an alarm in the job's store. All ranks then publish their state there, and
end with the verdict of the one that follows the waits. Calls of the store have no time-out, so
another thread ends the rank if the store is silent.
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
"""Time for ranks to publish their state, and time for an error to end a process."""
_SIGNAL = signal.SIGRTMIN + 7
"""Wakes the training thread out of a system call; nothing else uses it."""

OUTSIDE = "is between training steps"
_SILENT = "its process is gone, is stopped, or reaches nobody"


class RankState(NamedTuple):
    """What a rank does, as it reports it."""

    rank: int
    what: str = OUTSIDE
    """After `rank 3 `: `runs 5F3`, `waits`, `is in the optimizer step`."""
    waits_for: Sequence[tuple[int, str]] = ()
    """(global rank, what of it) that would end its wait, any of them."""
    in_collective: bool = False
    """True: it waits for all that have not reached that."""
    since_s: float = 0.0
    """How long it has been doing that; within the process, since when."""
    where: str = ""
    """The line of the program that its training thread is at."""
    entered: float = 0
    """Collectives of training steps that it has entered so far; infinite: it takes part in none."""

    def __str__(self) -> str:
        """Return the state in one line."""
        doing = self.what
        if self.waits_for:
            named = [f"{what} of rank {rank}" for rank, what in self.waits_for[:4]]
            named += [f"{len(self.waits_for) - 4} others"] * (len(self.waits_for) > 4)
            doing = f"waits for {' or '.join(named)}"
        return f"rank {self.rank} {doing} {self.lasting}"

    @property
    def lasting(self) -> str:
        """Duration of that, and the place of its training thread, if that is known."""
        return f"for {self.since_s:.1f} s" + (f", at {self.where}" if self.where else "")


def made_by(message: Message) -> str:
    """Return the action that produces a message, for example `5B3`, or the message's name."""
    kind, stage, microbatch, part = message[:4]
    if kind in ("F", "B"):
        of = f".{part}" if part else ""
        return f"{stage + (1 if kind == 'B' else -1)}{kind}{microbatch}{of}"
    return str(message)


class Verdict(NamedTuple):
    """The cause of a hang."""

    chain: str
    """`rank 2 waits for 5B3 of rank 3, which ...`"""
    culprits: Sequence[int]
    """The ranks that the others wait for."""

    @property
    def culprit(self) -> int | None:
        """The rank that all others wait for; None: several wait for each other."""
        return self.culprits[0] if len(self.culprits) == 1 else None

    @property
    def message(self) -> str:
        """Return the error text."""
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
    """Follow the waits from a rank to the one that waits for nobody, or has not answered.

    `state_of_silent` says what is known of the process of a rank without a state.
    """
    path, parts = [start], []
    while True:
        state = states.get(path[-1])
        if state is None:
            parts.append(f"says nothing: {state_of_silent(path[-1])}")
            break
        steps = state.waits_for
        if state.in_collective:
            passed = [other for other in states if states[other].entered >= state.entered]
            steps = [(other, "") for other in range(num_ranks) if other not in passed]
        # Silent ranks come first, then those that wait too.
        steps = sorted(steps, key=lambda step: step[0] in states)
        if not steps:
            parts.append(f"{state.what} {state.lasting}")
            break
        fresh = [step for step in steps if step[0] not in path]
        rank, what = (fresh or steps)[0]
        if state.in_collective:
            parts.append(f"{state.what} and waits there for rank {rank}")
        else:
            parts.append(f"waits for {what} of rank {rank}")
        if not fresh:
            circle = path[path.index(rank) :]
            parts.append("was named before: their tables do not fit each other")
            return Verdict(f"rank {start} {', which '.join(parts)}", tuple(sorted(circle)))
        path.append(rank)
    return Verdict(f"rank {start} {', which '.join(parts)}", (path[-1],))


def process_state(host: str, pid: int) -> str:
    """Say what holds a process that does not answer, as far as this host knows."""
    if host != socket.gethostname():
        return f"its process {pid} on {host} is gone, is stopped, or reaches nobody"
    try:
        status = Process(pid).status()
    except psutil.NoSuchProcess:
        return f"its process {pid} on {host} is gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process {pid} on {host} is stopped, by SIGSTOP or a debugger"
    if status == psutil.STATUS_ZOMBIE:
        return f"its process {pid} on {host} has ended"
    if status == psutil.STATUS_DISK_SLEEP:
        return f"its process {pid} on {host} waits for a device or a file system"
    return f"its process {pid} on {host} runs, but reaches nobody"


def _connected_again(store: Any) -> Any:
    """Return a store of this attempt of the job over a connection of its own."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    connection: Any
    if hasattr(store, "clone"):
        connection = store.clone()
    # Those of torch 2.7 lack it, and hide their prefix.
    elif isinstance(base := getattr(store, "_underlying_non_prefix_store", store), TCPStore):
        connection = TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    else:
        connection = FileStore(base.path)
    # torchrun keeps the store when it starts the ranks again, with the verdict on those before.
    prefix = "/".join(("megatron_ext/hang", *active.Environment.read().run))
    return PrefixStore(prefix, connection)


class Watchdog:
    """The thread that watches this process.

    Args:
        now: Gives the present state, which the training thread replaces as a whole.
        timeout_s: Seconds in one state from which the rank does not make progress.
    """

    def __init__(self, now: Callable[[], RankState], timeout_s: float) -> None:
        self._now, self.timeout_s = now, timeout_s
        self._period_s = min(_ANSWER_S, timeout_s / 4)  # an alarm is raised in time, and seen soon
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._verdict: Verdict | None = None

    def start(self) -> None:
        """Start to watch the calling thread; do nothing if it is watched already.

        Call it when the process groups exist.
        """
        if self._threads:
            return
        import torch.distributed as dist

        from megatron_ext.disaggregation.worlds import roles_in_force

        default: Any = dist.distributed_c10d._get_default_store()
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        job = active.job()
        if job is not None:  # torch.distributed knows the ranks of one role
            default, rank, num_ranks = roles_in_force().store, job.rank, job.ranks.num_ranks
        store = _connected_again(default)  # the connection of the training may be blocked
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._training = threading.get_ident()
        # Python's handlers run in the main thread, which some hosts do not train in.
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._old_handler = signal.signal(_SIGNAL, self._raise)
        for target, args in ((self._watch, (store, rank, num_ranks)), (self._watch_alone, (rank,))):
            thread = threading.Thread(target=target, args=args, name="watchdog", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        if not self._threads or threading.current_thread() in self._threads:
            return  # a thread cannot await itself
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * _ANSWER_S)
        self._threads.clear()
        if self._is_main and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._old_handler or signal.SIG_DFL)

    def _watch_alone(self, rank: int) -> None:
        """End this rank if it is stuck and the store does not answer the other thread."""
        # With time for the states of the others, and for the verdict of one of them.
        limit_s = self.timeout_s + 2 * self._period_s + 4 * _ANSWER_S
        while not self._stop.wait(self._period_s):
            if self._verdict is None and self._lasts(limit_s):
                reason = "the job's store does not answer"
                self._end(rank, Verdict(f"{self._state(rank)}; {reason}", (rank,)))
                return

    def _watch(self, store: Any, rank: int, num_ranks: int) -> None:
        """Check the training thread periodically, and the alarm of the others."""
        # A rank that is stopped cannot say so: others look at its process. Not in the training
        # thread, since a store that does not answer holds its callers up.
        with suppress(RuntimeError):
            store.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
        while not self._stop.wait(self._period_s):
            stuck = self._lasts(self.timeout_s)
            try:
                if stuck:
                    store.set("alarm", str(rank))
                elif not store.check(["alarm"]):
                    continue
                verdict = self._ask(store, rank, num_ranks)
            except RuntimeError as error:  # from the store, whose process may have died
                if not stuck:
                    continue
                reason = "the others cannot be reached: " + str(error).partition("\n")[0]
                verdict = Verdict(f"{self._state(rank)}; {reason}", (rank,))
            if not self._stop.is_set():
                self._end(rank, verdict)
            return

    def _lasts(self, limit_s: float) -> bool:
        """Return whether a training step has been in its present state for so long."""
        now = self._now()
        return now.what != OUTSIDE and time.monotonic() - now.since_s >= limit_s

    def _ask(self, store: Any, rank: int, num_ranks: int) -> Verdict:
        """Publish the state of this rank, collect the others', and agree on the cause."""
        state = self._state(rank)
        _LOG.error("%s", state)
        store.set(f"state/{rank}", json.dumps(state._asdict()))
        # One rank explains for all, so that the log has one explanation.
        if store.add("first", 1) > 1:
            store.wait(["verdict"], timedelta(seconds=3 * _ANSWER_S))
            return Verdict(*json.loads(store.get("verdict")))
        states = {rank: state}
        # The others look for an alarm once in a period, and wait no longer than this for a verdict.
        deadline = time.monotonic() + self._period_s + _ANSWER_S
        while len(states) < num_ranks and time.monotonic() < deadline:
            for other in set(range(num_ranks)) - states.keys():
                if store.check([f"state/{other}"]):
                    text = store.get(f"state/{other}").decode()
                    states[other] = RankState(**json.loads(text))
            self._stop.wait(0.1)
        waiting = [rank for rank, it in states.items() if it.waits_for or it.in_collective]
        start = min(waiting, default=int(store.get("alarm")))

        def state_of_silent(silent: int) -> str:
            if not store.check([f"process/{silent}"]):
                return _SILENT
            host, pid = json.loads(store.get(f"process/{silent}"))
            return process_state(host, pid)

        verdict = explain(states, num_ranks, start, state_of_silent)
        _LOG.error("nothing goes on: %s", verdict.chain)
        store.set("verdict", json.dumps(verdict))
        return verdict

    def _state(self, rank: int) -> RankState:
        """Return what this rank does, at its innermost line outside torch and this folder."""
        where, frame = "", sys._current_frames().get(self._training)
        while frame is not None and not where:
            name = frame.f_code.co_filename
            if "/torch/" not in name and "/megatron_ext/tracing/" not in name:
                where = f"{name.rpartition('/')[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        now = self._now()
        return now._replace(rank=rank, since_s=time.monotonic() - now.since_s, where=where)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        """Runs in the training thread as soon as that executes Python again."""
        if self._verdict is not None:
            raise HangError(self._verdict.message, self._verdict.culprit)

    def _end(self, rank: int, verdict: Verdict) -> None:
        """Raise the verdict in the training thread; if that does not end it, end the process."""
        self._verdict = verdict
        if self._is_main:
            # The signal also ends a system call, in which no Python error would reach the thread.
            signal.pthread_kill(self._training, _SIGNAL)
            if self._stop.wait(_ANSWER_S):
                return
        sys.stderr.write(f"[rank {rank}] megatron_ext: error: {verdict.message}\n")
        sys.stderr.flush()
        cause.write(cause.of_error(HangError(verdict.message, verdict.culprit)), verdict.message)
        os._exit(1)  # no handlers: what hangs would hang in them too
