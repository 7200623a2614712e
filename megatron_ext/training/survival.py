"""Adds this package's steps to in-process restarts, which NVIDIA's NVRx performs.

When a rank is lost, NVRx stops the training function on the surviving ranks and calls it again on
them and on reserve ranks. Between the two calls, each rank must stop waiting for the lost rank,
release the state that this package keeps, and number its new transports the same way as the other
ranks.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import Any, NamedTuple

from nvidia_resiliency_ext.inprocess import Compose
from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.initialize import Initialize

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.errors import UserError
from megatron_ext.sockets import OpenSocket, open_sockets
from megatron_ext.upstream import cause, parent

_LOG = logging.getLogger(__name__)
_TRANSFORMER = "megatron.core.transformer"
_LOSS_HELPERS = (
    f"{_TRANSFORMER}.multi_token_prediction.MTPLossLoggingHelper",
    f"{_TRANSFORMER}.experimental_attention_variant.dsa.DSAIndexerLossLoggingHelper",
)
"""Megatron's classes that sum a step's losses in a dictionary named `tracker`."""


class StoreConnection:
    """An attempt's connection to its ranks' rendezvous store.

    A rank that waits in the store for a lost rank would do so for minutes, and torch cannot cancel
    the wait. Shutting down the connection unblocks the rank. The store that Megatron passes serves
    all attempts, so each attempt needs a connection that nothing else uses.
    """

    def __init__(self) -> None:
        self._sockets: set[OpenSocket] = set()
        self._is_over = False
        """Whether the attempt has lost a rank."""

    def end_attempt(self) -> None:
        """Let the next connection serve a new attempt."""
        self._is_over = False

    def open(self, store: Any) -> Any:
        """Return the same store over a new connection, with a key prefix for this attempt."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        sockets: set[OpenSocket] = set()
        before = open_sockets()
        connection = TCPStore(
            base.host,
            base.port,
            is_master=False,
            wait_for_workers=False,
            timeout=base.timeout,
        )
        for opened in open_sockets() - before:
            ends = opened.tcp_ends()
            # Other threads may have opened sockets in the meantime.
            if ends is not None and ends.peer_port == base.port:
                sockets.add(opened)
        self._sockets = sockets
        # NVRx's thread may have called `shut_down` before the connection existed.
        if self._is_over:
            self.shut_down()
        return PrefixStore(f"attempt {active.attempt()}", connection)

    def shut_down(self) -> None:
        """Unblock this attempt's calls to the store, now and later. Called from another thread."""
        self._is_over = True
        for opened in self._sockets:
            opened.shut_down()
        self._sockets = set()


store_connection = StoreConnection()


class BeginAttempt(Initialize):
    """Runs before each call of the training function, including on reserve ranks."""

    def __init__(self) -> None:
        self._excepthook = sys.excepthook
        """The hook for uncaught exceptions before the first attempt."""

    def __call__(self, state: Any) -> Any:
        """Number the attempt, so that all ranks give their transports the same names."""
        # NVRx calls this only after it has received every rank's state.
        parent.note_ranks_met()
        parent.note_reserve(is_in_reserve=state.active_rank is None)
        active.begin_attempt(state.iteration)
        # torch wraps the hook in each attempt, and each wrapper prefixes every line of
        # a traceback with the rank.
        sys.excepthook = self._excepthook
        devices.current().follow_collectives()
        if state.iteration > 0 and state.rank == 0:
            # The launcher reads this line (`tools/launch/keeper.py`), so write it to stderr, where
            # --logging-level cannot suppress it.
            sys.stderr.write(
                f"megatron_ext: restart {state.iteration} in the same processes: "
                f"{state.world_size} of {state.initial_world_size} ranks are left\n"
            )
            sys.stderr.flush()
        if state.iteration == 0:
            # NVRx collects garbage twice per restart, which took 0.65 s of 1.9 s. Most
            # objects belong to imported modules and never become garbage, so exclude
            # them.
            gc.freeze()
        return state


class EndWaits(Abort):
    """Runs in an NVRx thread, while the training function may be waiting for a lost rank."""

    def __call__(self, state: Any) -> Any:
        """Unblock calls that are waiting for messages or in collectives that torch cannot abort."""
        configuration = active.active()
        if configuration is not None:
            with _errors_logged(state.rank, "transports"):
                configuration.abort(
                    "a rank was lost; the job starts again in the same processes"
                )
        with _errors_logged(state.rank, "collectives"):
            devices.current().abort_collectives()
        with _errors_logged(state.rank, "waits in the store"):
            store_connection.shut_down()
        return state


@contextmanager
def _errors_logged(rank: int, waits: str) -> Iterator[None]:
    """Log an error in the body instead of raising it, so that the next calls are unblocked too."""
    try:
        yield
    except Exception:  # noqa: BLE001 - transports and devices raise various errors
        _LOG.exception("rank %s could not abort its %s", rank, waits)


class _Failure(NamedTuple):
    """An error that a rank raised."""

    description: str
    step: int
    """0 before the first step."""


class EndConfiguration(Finalize):
    """Runs after the training function has returned or raised, and before NVRx calls it again."""

    def __init__(self) -> None:
        self._last_failure: _Failure | None = None
        """The last error that this rank itself raised.

        Reset to None once training has passed that step.
        """

    def __call__(self, state: Any) -> Any:
        """Close the configuration's transports and all its other state.

        Raises:
            Exception: The training function's error, if a restart would only repeat it.
        """
        # NVRx aborts an attempt at most once, in a thread that has finished by now. Reset the
        # connection here rather than in `BeginAttempt`, because the next attempt's thread starts
        # before that.
        store_connection.end_attempt()
        # Check this first: Megatron's arguments contain the step number and are
        # destroyed next.
        would_come_again = self._would_come_again(state.fn_exception)
        active.clear_configuration()
        _clear_caches_of_megatron()
        _clear_logged_losses_of_megatron()
        if would_come_again:
            raise state.fn_exception
        return state

    def _would_come_again(self, error: Exception | None) -> bool:
        """Return whether restarting would only repeat this error (NVRx would do so forever)."""
        step = cause.current_iteration() or 0
        last_failure = self._last_failure
        if last_failure is not None and step > last_failure.step:
            self._last_failure = None  # the restart has helped
        if error is None:
            return False
        if isinstance(error, UserError):
            return True
        kind = cause.of_error(error).kind
        if kind not in ("error", "hang"):  # another rank has failed
            return False
        # Compare hangs only by their kind, because a hang's text contains its duration.
        if kind == "hang":
            description = kind
        else:
            description = repr(error)
        failure = _Failure(description, step)
        is_same = failure == self._last_failure
        self._last_failure = failure
        if is_same:
            _LOG.error(
                "the same error occurred in the same step after a restart, so the rank exits"
            )
        return is_same


def _clear_caches_of_megatron() -> None:
    """Clear the caches on Megatron's methods (`functools.lru_cache`).

    A cache also keeps the instances alive. Rotary embeddings hold a process group, with threads and
    connections.
    """
    for name, module in list(sys.modules.items()):
        # The value is None for a module whose import is blocked.
        if module is None or not name.startswith("megatron."):
            continue
        for member in list(vars(module).values()):
            if not isinstance(member, type):
                continue
            for method in vars(member).values():
                if isinstance(method, _lru_cache_wrapper):
                    method.cache_clear()


def _clear_logged_losses_of_megatron() -> None:
    """Drop what the interrupted step has added to losses that Megatron sums for its log.

    The sums belong to modules and classes, so the next attempt would continue them, and reduce them
    over a process group of this attempt.
    """
    for name in _LOSS_HELPERS:
        module_name, _, class_name = name.rpartition(".")
        module = sys.modules.get(module_name)
        if module is not None:
            getattr(module, class_name).tracker.clear()
    # Early releases have a dictionary, later ones an object.
    moe_utils = sys.modules.get(f"{_TRANSFORMER}.moe.moe_utils")
    getattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()
    moe_logging = sys.modules.get(f"{_TRANSFORMER}.moe.moe_logging")
    if moe_logging is not None:
        moe_logging.destroy_moe_metrics_tracker()


def with_our_part(settings: dict[str, Any]) -> dict[str, Any]:
    """Return an NVRx wrapper's settings with this package's steps added."""
    # In a composition, NVRx calls the last step first, so put our steps last. Our steps must run
    # first: NVRx interrupts the training thread between two lines of Python, and a thread that
    # waits for a message executes no Python code.
    our_steps = {
        "initialize": BeginAttempt(),
        "abort": EndWaits(),
        "finalize": EndConfiguration(),
    }
    composed = dict(settings)
    for name, step in our_steps.items():
        user_step = settings.get(name)
        if user_step is None:
            composed[name] = step
        else:
            composed[name] = Compose(user_step, step)
    return composed
