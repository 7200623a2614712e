"""Reports an error in one line, once on each host, however many of its ranks have it.

Before the ranks are connected an error may be one rank's (a package that only the last rank
imports) or one host's (a file that is not there), and no rank can ask the others. So a rank reports
unless it knows that another one on its host did, and hosts that fail leave a notice in the store
of torchrun, because the others would wait for them in `init_process_group` for minutes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_ext.errors import line_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["report", "watching_other_hosts"]

_HELD_S = 0.3
"""For how long a rank that has reported keeps the others on its host from it. It ends before they
do, so that a launcher shows the log of a rank with a reason."""
_OTHERS_S = 1.0
_CONNECT_S = 5.0
_LOOK_S = 1.0
_KEY = "megatron_ext/failed"


def report(error: BaseException) -> None:
    """Print an error that needs no traceback, unless another rank of this host just did."""
    line = line_of(error)
    # Ignored until the line is out: the launcher ends all ranks as soon as one of the others has.
    terminate = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as claim:
        is_first, connected = _is_first(claim, line), _is_connected()
        if is_first:
            rank = os.environ.get("RANK", "0")
            prefix = f"[rank {rank}] " if connected else ""
            sys.stderr.write(f"{prefix}megatron_ext: error: {line}\n")
            sys.stderr.flush()
            if not connected and _has_other_hosts():
                with suppress(RuntimeError):  # the host of the store has ended: so do its ranks
                    _store().set(_key(), f"rank {rank} on {socket.gethostname()}: {line}")
        signal.signal(signal.SIGTERM, terminate)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(_HELD_S if is_first else _OTHERS_S)


def _is_first(claim: socket.socket, line: str) -> bool:
    """Return whether no other rank of this host is reporting the same line.

    The claim is a name of a socket in no file system: it ends with its process.
    """
    job = (os.getuid(), os.getppid(), os.environ.get("TORCHELASTIC_RUN_ID", ""), line)
    name = hashlib.sha256(repr(job).encode()).hexdigest()
    try:
        claim.bind(f"\0megatron_ext/{name}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _is_connected() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _has_other_hosts() -> bool:
    """Return whether torchrun started ranks on other hosts too, and keeps a store for all."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
    return f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def watching_other_hosts() -> Iterator[None]:
    """End this process, with the reason, if another host fails before the ranks are connected.

    One rank on each host watches: torchrun ends the others with it.
    """
    if not _has_other_hosts() or os.environ.get("LOCAL_RANK") != "0":
        yield
        return
    left = threading.Event()
    # Joined below: a thread inside of the store would be ended by the interpreter's exit, which
    # aborts the process.
    watch = threading.Thread(target=_watch, args=(left,), name="watch-hosts", daemon=True)
    watch.start()
    try:
        yield
    finally:
        left.set()
        watch.join(_CONNECT_S + _LOOK_S)


def _watch(left: threading.Event) -> None:
    from torch.distributed import DistStoreError

    try:
        store = _store()
        while not left.is_set() and not _is_connected():
            try:
                store.wait([_key()], timedelta(seconds=_LOOK_S))
            except DistStoreError:  # nobody has failed yet
                continue
            if left.is_set():
                return  # it is reporting an error of its own
            reason = line_of(store.get(_key()).decode(errors="replace"))
            sys.stderr.write(f"megatron_ext: error: {reason}\n")
            sys.stderr.flush()
            os._exit(2)  # the main thread waits in `init_process_group`, deaf to exceptions
    except RuntimeError:
        return  # the store's host has ended, which the main thread sees too
