"""torchrun with a machine-readable report, and a bound on the time that it takes to end.

    python -m megatron_ext.tools.launch.elastic REPORT.json GRACE_S TORCHRUN_FLAGS SCRIPT ...

torchrun itself reports the first failed rank as a drawing in its log. And after a failure it sends
SIGTERM to the other ranks of its host and waits half a minute for them before it reports: here they
are killed after the grace period. Everything else is torchrun's own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ext import files
from megatron_ext.tools.launch import process

__all__ = ["main"]

_KILLING = ("os.kill", "os.killpg")


@contextmanager
def _bounded_end(grace_s: float) -> Iterator[None]:
    """Kill remaining children when the grace period after this process's first signal ends.

    torchrun has no such setting, and no hook when it begins to stop its ranks. But it sends them
    signals, which Python's audit hook sees. An audit hook cannot be removed; after the block it has
    no effect.
    """
    killer = threading.Timer(grace_s, lambda: process.end(process.descendants(os.getpid())))
    killer.daemon = True
    begun = threading.Lock()

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in _KILLING and arguments[1] != 0 and begun.acquire(blocking=False):
            killer.start()

    sys.addaudithook(look)
    try:
        yield
    finally:
        begun.acquire(blocking=False)
        killer.cancel()


def main() -> int:
    """Run torchrun; return its exit code, that of the first failed rank if one failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report, grace_s, arguments = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    try:
        with _bounded_end(grace_s):
            run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        found = {
            "rank": rank,
            "local_rank": failure.local_rank,
            "pid": failure.pid,
            "exit_code": failure.exitcode,
        }
        with suppress(OSError):  # a full disk, which may be why the rank failed
            files.write_text(report, json.dumps(found))
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all workers have exited; torch's shutdown would only delay the report
