"""torchrun with a report that a program can read, and a bound on how long it takes to end.

    python -m megatron_ext.launch.elastic REPORT.json GRACE_S TORCHRUN_FLAGS SCRIPT ...

Which rank failed first, and how, torchrun itself tells as a drawing in its log. And when a rank
has failed it asks the others of its host to end, and waits half a minute for those that do not
listen before it says anything: here they are killed after the grace. The rest is torchrun's own.
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
from megatron_ext.launch import process

__all__ = ["main"]

_KILLING = ("os.kill", "os.killpg")


@contextmanager
def _bounded_end(grace_s: float) -> Iterator[None]:
    """Kill what is left below this process when the grace since its first signal is over.

    torchrun has no such setting, and no hook where it begins to end its ranks; but it sends them
    signals, and of those the interpreter tells. Python has no way to take its hook out again; when
    the block is left it does nothing any more.
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
    os._exit(code)  # all workers are gone; taking torch apart would only delay the report
