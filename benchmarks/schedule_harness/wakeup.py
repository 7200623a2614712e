"""The wake-up latency of a sleeping process on this machine: the lower bound of a message."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["wakeup_s"]

_ANSWER_S = 60.0


def wakeup_s(idle_s: float, num_samples: int = 25) -> float:
    """Return the median time from a write to a pipe until its reader, asleep, goes on.

    Reader and writer are on different CPUs if there are several, and idle before each sample.

    Args:
        idle_s: How long before each.
        num_samples: How many.

    Raises:
        TimeoutError: The reader does not answer.
        EOFError: It ended.
    """
    context = multiprocessing.get_context("fork")
    there, here = context.Pipe(duplex=True)
    reader = context.Process(target=_read, args=(there, num_samples), daemon=True)
    reader.start()
    there.close()
    found_s = []
    for _ in range(num_samples):
        time.sleep(idle_s)
        begin_s = time.perf_counter()
        here.send_bytes(b"wake up")
        if not here.poll(_ANSWER_S):
            raise TimeoutError(f"a process did not answer within {_ANSWER_S:g} s of a write to it")
        found_s.append(here.recv() - begin_s)
    reader.join(_ANSWER_S)
    here.close()
    return statistics.median(found_s)


def _read(connection: Connection, num_samples: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for _ in range(num_samples):
        connection.recv_bytes()
        connection.send(time.perf_counter())  # the clock is the machine's
