"""Reports an error in one line, once on each host, however many of its ranks have it.

Before the ranks are connected an error may be one rank's (a package that only the last rank
imports) or one host's (a file that is not there), and no rank can consult the others. So a rank
reports unless it knows that another one on its host did, and hosts that fail leave a notice in the
store of torchrun, because the others would wait for them in `init_process_group` for minutes.
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

# Shortest stay of a rank that has reported, which keeps the others on its host from it. It ends
# before they do, so that a launcher shows the log of a rank with a reason.
_HELD_S = 0.3
# Of ranks with nothing to add: longer, so that the one with the reason ends first.
_OTHERS_S = 1.0
# Longest stay of a rank that lost another one. torchrun takes the rank that ends first for the one
# that failed, and the interpreter's exit of the one with the reason takes seconds.
_CAUSE_S = 5.0
_CONNECT_S = 5.0
_LOOK_S = 0.5
_KEY = "megatron_ext/failed"


def report(error: BaseException) -> None:
    """Print an error that needs no traceback, unless another rank of this host just did."""
    line = line_of(error)
    is_first, connected = _is_first(line), _is_connected()
    # Every rank, also one that has nothing to print: its launcher may end it by SIGKILL while it is
    # in its exit, and would take that for the cause.
    cause.write(cause.of_error(error), line)
    if is_first:
        rank = os.environ.get("RANK", "0")
        prefix = f"[rank {rank}] " if connected else ""
        sys.stderr.write(f"{prefix}megatron_ext: error: {line}\n")
        sys.stderr.flush()
        # Once connected, the other hosts notice by themselves: their collectives fail.
        if not connected and _has_other_hosts():
            with suppress(RuntimeError):  # the host of the store has ended: so do its ranks
                _store().set(_key(), f"rank {rank} on {socket.gethostname()}: {line}")
    if isinstance(error, TransportError) and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends this rank with SIGTERM as soon as it has seen the one that failed.
        ended = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait(_CAUSE_S)
        signal.signal(signal.SIGTERM, before)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(_HELD_S if is_first else _OTHERS_S)


def report_exit(error: SystemExit) -> bool:
    """Note which line ended this rank; print that if nothing else says it.

    The other ranks lose their connection to this one, and name it as the one with the reason.

    Returns:
        Whether the exit code has to be 1: Megatron leaves with 0 if it does not load a checkpoint.
    """
    ending = cause.of_error(error)
    cause.write(ending, ending.reason)
    has_failed = cause.left_while_loading(error)
    is_told = isinstance(error.code, str)  # by Python
    # All ranks leave when Megatron rejects a result of one of them: that one has the reason.
    is_cause = (error.code or has_failed) and ending.kind != "effect"
    if is_cause and not is_told and _is_first(ending.reason):
        prefix = f"[rank {ending.rank}] " if _is_connected() else ""
        sys.stderr.write(f"{prefix}megatron_ext: error: {ending.reason}\n")
        sys.stderr.flush()
    return has_failed


def report_interrupt() -> None:
    """Print on the first rank how far an interrupted training got, and how to go on."""
    if os.environ.get("RANK", "0") != "0":
        return
    line = "interrupted before the training began"
    args = megatron_arguments()
    if args is not None and getattr(args, "curr_iteration", None):
        # Megatron counts a step when the next one begins, and saves before that.
        saved = None if args.save is None else _last_saved(args.save)
        iteration = max(args.curr_iteration, saved or 0)
        line = f"interrupted at iteration {iteration}; {to_resume(args.save, args.load)}"
    sys.stderr.write(f"megatron_ext: {line}\n")
    sys.stderr.flush()


def to_resume(save: str | None, load: str | None) -> str:
    """Describe the last checkpoint of a training, and how to go on from it."""
    if save is None:
        return "nothing was saved (--save DIR --load DIR)"
    last = _last_saved(save)
    if last is None:
        return f"no checkpoint in {save} on this machine"
    return f"checkpoint {last}; " + (
        "run again to resume" if load else f"resume with --load {save}"
    )


def _last_saved(save: str) -> int | None:
    """Return the iteration of the last whole checkpoint in a folder, if there is one."""
    try:
        return int((Path(save) / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):  # or that of a release, which has no number
        return None


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Yield an event that is set when Ctrl-C ends the block; further ones are ignored then.

    A rank that waits in a collective notices the end of its peers first: an error of the connection
    then ends it, though nobody but the user is its reason.
    """
    interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        interrupted.set()
        logging.disable()  # Megatron logs the traceback of what passes through it
        raise KeyboardInterrupt

    replaces = before is signal.default_int_handler  # unless SIGINT is ignored
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
    """Return whether no other rank of this host has reported the same line.

    The claim is a name of a socket in no file system: it ends with its process, so it stays open.
    """
    # The ranks of a host have one parent, the launcher's agent: so two jobs of a user, or a job
    # that is started again, do not silence each other.
    job = (os.getuid(), os.getppid(), os.environ.get("TORCHELASTIC_RUN_ID", ""), line)
    digest = hashlib.sha256(repr(job).encode()).hexdigest()
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0megatron_ext/{digest}")
    except OSError as error:
        claim.close()
        # Where there are no such sockets, better twice than not at all.
        return error.errno != errno.EADDRINUSE
    claim.detach()
    # The first to report may have ended: on a loaded host a rank comes seconds later. torchrun has
    # its reason in a file, in the folder beside this rank's.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    with suppress(OSError):  # torchrun removes the folder once it has read it
        for path in Path(error_file).parent.parent.glob("*/error.json"):
            if json.dumps(line) in path.read_text():
                return False
    return True


def _is_connected() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _has_other_hosts() -> bool:
    """Return whether torchrun started ranks on other hosts too, and keeps a store for all."""
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
    # A restart keeps the store: what failed before it says nothing of this one.
    return f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def watching_other_hosts() -> Iterator[None]:
    """End this process, with the reason, if another host fails before the ranks are connected.

    One rank on each host watches: torchrun ends the others with it.
    """
    if not _has_other_hosts() or os.environ.get("LOCAL_RANK") != "0":
        yield
        return
    is_over = threading.Event()
    # Joined below: the interpreter's exit would abort the process for a thread inside the store.
    watch = threading.Thread(target=_watch, args=(is_over,), name="watch-hosts", daemon=True)
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
            # Not `wait`, which logs two lines of warnings each time that nobody has failed.
            if not store.check([_key()]):
                is_over.wait(_LOOK_S)
                continue
            if is_over.is_set():
                return  # it is reporting an error of its own
            reason = line_of(store.get(_key()).decode(errors="replace"))
            sys.stderr.write(f"megatron_ext: error: {reason}\n")
            sys.stderr.flush()
            os._exit(2)  # the main thread waits in `init_process_group`, deaf to exceptions
    except RuntimeError:
        return  # the store's host has ended, which the main thread sees too
