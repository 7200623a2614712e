"""Ends a job that hangs, with the name of the rank that holds it up.

A thread of each rank checks whether the training thread makes progress. If it does not for the
time-out, the rank raises an alarm in the job's store. All ranks then publish their state there; the
first that raised the alarm follows the waits (`hang.py`), prints the result once, and publishes the
verdict. Each rank ends with it: by an error in its training thread if that still responds, else by
ending the process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import HangError
from megatron_ext.tracing.hang import RankState, Verdict, explain

if TYPE_CHECKING:
    from megatron_ext.tracing.activity import Activity

__all__ = ["Watchdog"]

_LOG = logging.getLogger(__name__)
_PREFIX = "megatron_ext/hang"
_ANSWER_S = 5.0
"""Time for ranks to publish their state, and time for an error to end a process."""
_SIGNAL = signal.SIGRTMIN + 7
"""Wakes the training thread out of a system call; nothing else uses it."""


@dataclass
class Watchdog:
    """The thread that watches this process."""

    activity: Activity
    timeout_s: float
    _thread: threading.Thread | None = field(default=None, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _verdict: Verdict | None = field(default=None, init=False)
    _training: int = field(default=0, init=False)
    _old_handler: Any = field(default=None, init=False)

    def start(self) -> None:
        """Start to watch the calling thread; do nothing if it is watched already.

        Call it from the main thread, after the process groups exist.
        """
        if self._thread is not None:
            return
        import torch.distributed as dist

        from megatron_ext.disaggregation import job as disaggregation
        from megatron_ext.disaggregation.worlds import shared_store

        default: Any = dist.distributed_c10d._get_default_store()
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        job = disaggregation.current()
        if job is not None:  # torch.distributed knows the ranks of one role
            default, rank, num_ranks = shared_store(), job.rank, job.ranks.num_ranks
        store = default.clone()  # a separate connection: the other may be blocked
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._training = threading.get_ident()
        self._old_handler = signal.signal(_SIGNAL, self._raise)
        self._thread = threading.Thread(
            target=self._watch,
            args=(store, rank, num_ranks),
            name="megatron_ext watchdog",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._stop.set()
        self._thread.join(2 * _ANSWER_S)
        self._thread = None
        if threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._old_handler or signal.SIG_DFL)

    def _watch(self, store: Any, rank: int, num_ranks: int) -> None:
        """Check the training thread periodically, and the alarm of the others."""
        period_s = min(5.0, self.timeout_s / 4)
        seen, since_s = -1, time.monotonic()
        while not self._stop.wait(period_s):
            if self.activity.count != seen or not self.activity.is_watched:
                seen, since_s = self.activity.count, time.monotonic()
            stuck = time.monotonic() - since_s >= self.timeout_s
            try:
                if stuck:
                    store.set(f"{_PREFIX}/alarm", str(rank))
                elif not store.check([f"{_PREFIX}/alarm"]):
                    continue
                self._verdict = self._ask(store, rank, num_ranks)
            except RuntimeError as error:  # from the store, whose process may have died
                if not stuck:
                    continue
                state = self._state(rank)
                reason = str(error).partition("\n")[0]
                self._verdict = Verdict(f"{state}; the others cannot be asked: {reason}", (rank,))
            if not self._stop.is_set():
                self._end(rank)
            return

    def _ask(self, store: Any, rank: int, num_ranks: int) -> Verdict:
        """Publish the state of this rank, collect the others', and agree on the cause."""
        mine = self._state(rank)
        _LOG.error("%s", mine)
        store.set(f"{_PREFIX}/state/{rank}", mine.dumps())
        if store.add(f"{_PREFIX}/first", 1) > 1:
            key = f"{_PREFIX}/verdict"
            store.wait([key], timedelta(seconds=3 * _ANSWER_S))
            chain, culprits = json.loads(store.get(key))
            return Verdict(chain, tuple(culprits))
        states = {rank: mine}
        deadline = time.monotonic() + max(_ANSWER_S, self.timeout_s / 2)
        while len(states) < num_ranks and time.monotonic() < deadline:
            for other in set(range(num_ranks)) - states.keys():
                if store.check([f"{_PREFIX}/state/{other}"]):
                    text = store.get(f"{_PREFIX}/state/{other}").decode()
                    states[other] = RankState.loads(text)
            self._stop.wait(0.1)
        waiting = [other for other, state in states.items() if state.waits_for or state.collective]
        start = min(waiting, default=int(store.get(f"{_PREFIX}/alarm")))
        verdict = explain(states, num_ranks, start)
        _LOG.error("nothing goes on: %s", verdict.chain)
        store.set(f"{_PREFIX}/verdict", json.dumps([verdict.chain, verdict.culprits]))
        return verdict

    def _state(self, rank: int) -> RankState:
        activity = self.activity
        frame = sys._current_frames().get(self._training)
        return RankState(
            rank,
            activity.what,
            activity.waits_for,
            activity.collective,
            time.monotonic() - activity.since_s,
            "" if frame is None else _place(frame),
        )

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        """Runs in the training thread as soon as that executes Python again."""
        if self._verdict is not None:
            raise HangError(self._verdict.message)

    def _end(self, rank: int) -> None:
        """Raise the verdict in the training thread; if that does not end it, end the process."""
        signal.pthread_kill(self._training, _SIGNAL)
        if self._stop.wait(_ANSWER_S):
            return
        assert self._verdict is not None
        sys.stderr.write(f"[rank {rank}] megatron_ext: error: {self._verdict.message}\n")
        sys.stderr.flush()
        os._exit(1)


def _place(frame: FrameType) -> str:
    """Return the innermost line outside torch and this room."""
    found: FrameType | None = frame
    while found is not None:
        name = found.f_code.co_filename
        if "/torch/" not in name and "/megatron_ext/tracing/" not in name:
            return f"{name.rpartition('/')[2]}:{found.f_lineno} in {found.f_code.co_name}"
        found = found.f_back
    return ""
