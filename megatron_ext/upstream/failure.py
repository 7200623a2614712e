"""Reports an error in one line, once per host, however many ranks on the host raise it.

Before the ranks are connected, an error may affect one rank (a package that only the last rank
imports) or one host (a missing file), and the ranks cannot consult each other. So a rank reports
its error unless it knows that another rank on its host has reported the same error. A failing host
also leaves a notice in torchrun's store. Without it, the other hosts would wait for minutes in
`init_process_group`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import TransportError, line_of
from megatron_ext.upstream import cause
from megatron_ext.upstream.signatures import megatron_arguments

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# A rank that has reported stays alive for this long, so that the other ranks on its
# host do not report too. The rank exits before they do, so that a launcher shows the
# log of a rank with a reason.
_HELD_S = 0.3
# Ranks that have not reported wait longer, so that the rank that has reported exits first.
_OTHERS_S = 1.0
# The longest time that a rank stays alive after it has lost a peer. torchrun treats the
# first rank to exit as the failed one, but the rank with the reason takes seconds to
# exit.
_CAUSE_S = 5.0
# Time-out of a connection to torchrun's store, and the interval between checks of the store.
_CONNECT_S = 5.0
_LOOK_S = 0.5
_KEY = "megatron_ext/failed"


def report(error: BaseException) -> None:
    """Print an error without its traceback, unless another rank on this host has printed it."""
    line = line_of(error)
    is_first = _is_first(line)
    connected = _is_connected()
    # Every rank writes its cause, even if it prints nothing. The launcher may SIGKILL
    # it while it exits and would otherwise report the SIGKILL as the cause.
    cause.write(cause.of_error(error), line)
    if is_first:
        rank = cause.started_rank()
        prefix = f"[rank {rank}] " if connected else ""
        sys.stderr.write(f"{prefix}megatron_ext: error: {line}\n")
        sys.stderr.flush()
        # Once connected, the other hosts notice the failure on their own, because their
        # collectives fail.
        if not connected and _has_other_hosts():
            # This fails if the store's host has exited, in which case the job stops
            # without the notice.
            with suppress(RuntimeError):
                _store().set(_key(), f"rank {rank} on {socket.gethostname()}: {line}")
    if isinstance(error, TransportError) and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun stops this rank with SIGTERM as soon as it notices the failed rank.
        ended = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait(_CAUSE_S)
        signal.signal(signal.SIGTERM, before)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        delay_s = _HELD_S if is_first else _OTHERS_S
        time.sleep(delay_s)


def report_exit(error: SystemExit) -> bool:
    """Record which line called `sys.exit` on this rank; print it if nothing else does.

    The other ranks lose their connection to this one, and their messages point to it for the
    reason.

    Returns:
        Whether the exit code must be 1: Megatron exits with 0 if it does not load a checkpoint.
    """
    ending = cause.of_error(error)
    cause.write(ending, ending.reason)
    has_failed = cause.left_while_loading(error)
    is_told = isinstance(error.code, str)  # Python prints it
    # When Megatron rejects a result on one rank, all ranks exit, but only that rank has the reason.
    is_cause = (error.code or has_failed) and ending.kind != "effect"
    if is_cause and not is_told and _is_first(ending.reason):
        prefix = f"[rank {ending.rank}] " if _is_connected() else ""
        sys.stderr.write(f"{prefix}megatron_ext: error: {ending.reason}\n")
        sys.stderr.flush()
    return has_failed


def report_interrupt() -> None:
    """Print, on the first rank, how far an interrupted run got and how to continue it."""
    if os.environ.get("RANK", "0") != "0":
        return
    line = "interrupted before training began"
    args = megatron_arguments()
    if args is not None and getattr(args, "curr_iteration", None):
        # Megatron updates `curr_iteration` when the next step starts, but saves before that.
        saved = None
        if args.save is not None:
            saved = _last_saved(args.save)
        iteration = max(args.curr_iteration, saved or 0)
        how_to_resume = to_resume(args.save, args.load)
        line = f"interrupted at iteration {iteration}; {how_to_resume}"
    sys.stderr.write(f"megatron_ext: {line}\n")
    sys.stderr.flush()


def to_resume(save: str | None, load: str | None) -> str:
    """Describe a training run's last checkpoint and how to continue from it."""
    if save is None:
        return "nothing was saved (--save DIR --load DIR)"
    last = _last_saved(save)
    if last is None:
        return f"no checkpoint in {save} on this machine"
    if load:
        return f"checkpoint {last}; run again to resume"
    return f"checkpoint {last}; resume with --load {save}"


def _last_saved(save: str) -> int | None:
    """Return the iteration of the last complete checkpoint in a folder, if any."""
    try:
        text = (Path(save) / "latest_checkpointed_iteration.txt").read_text()
        return int(text)
    except (OSError, ValueError):  # a `release` checkpoint has no number
        return None


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Yield an event that is set when Ctrl-C interrupts the block; a second Ctrl-C is ignored.

    Check the event instead of the exception: a rank that waits in a collective may first notice
    that its peers have exited, and then raise a connection error even though the user interrupted
    it.
    """
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        interrupted.set()
        logging.disable()  # Megatron logs the traceback of exceptions that pass through it
        raise KeyboardInterrupt

    replaces = before is signal.default_int_handler  # SIGINT is not ignored
    if replaces:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        if interrupted.is_set():  # the process is about to end
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif replaces:
            signal.signal(signal.SIGINT, before)


def _is_first(line: str) -> bool:
    """Return whether no other rank on this host has reported the same line.

    A rank claims the line by binding an abstract socket name. The kernel frees the name when the
    process exits, so the socket is left open.
    """
    # All ranks on a host have the launcher's agent as their parent. The name includes
    # its id, so that a user's two jobs, or a job and its restart, do not silence each
    # other.
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    name_parts = (os.getuid(), os.getppid(), run_id, line)
    digest = hashlib.sha256(repr(name_parts).encode()).hexdigest()
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0megatron_ext/{digest}")
    except OSError as error:
        claim.close()
        # If abstract sockets are not available, report twice rather than not at all.
        return error.errno != errno.EADDRINUSE
    claim.detach()
    # The first rank to report may have exited already: on a loaded host, a rank may fail seconds
    # later. torchrun keeps the reason in a file, in a folder next to this rank's folder.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    folder_of_ranks = Path(error_file).parent.parent
    line_in_json = json.dumps(line)
    with suppress(OSError):  # torchrun removes the folder once it has read it
        for path in folder_of_ranks.glob("*/error.json"):
            if line_in_json in path.read_text():
                return False
    return True


def _is_connected() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
    )


def _has_other_hosts() -> bool:
    """Return whether torchrun also started ranks on other hosts, with one store for all hosts."""
    has_several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return has_several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store() -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
    )


def _key() -> str:
    # A restart keeps the store, so number the attempts: old failures must not stop a new attempt.
    return f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def watching_other_hosts() -> Iterator[None]:
    """Exit with the reason if another host fails before the ranks are connected.

    One rank per host watches the store. When that rank exits, torchrun stops the host's other
    ranks.
    """
    if not _has_other_hosts() or os.environ.get("LOCAL_RANK") != "0":
        yield
        return
    is_over = threading.Event()
    # The thread is joined below: if it were still inside the store at exit, the interpreter would
    # abort the process.
    watch = threading.Thread(
        target=_watch, args=(is_over,), name="watch-hosts", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join(_CONNECT_S + _LOOK_S)


def _watch(is_over: threading.Event) -> None:
    try:
        store = _store()
        while not is_over.is_set() and not _is_connected():
            # Do not use `wait`, which logs two lines of warnings each time it finds no
            # failure.
            if not store.check([_key()]):
                is_over.wait(_LOOK_S)
                continue
            if is_over.is_set():
                return  # this process is reporting its own error
            reason = line_of(store.get(_key()).decode(errors="replace"))
            sys.stderr.write(f"megatron_ext: error: {reason}\n")
            sys.stderr.flush()
            # The main thread is blocked in `init_process_group`, where exceptions do not reach it.
            os._exit(2)
    except RuntimeError:
        return  # the store's host has exited, which the main thread notices too
