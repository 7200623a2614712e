"""torchrun with a machine-readable report and a time limit for shutting down.

    python -m megatron_ext.tools.launch.elastic REPORT.json GRACE_S TORCHRUN_FLAGS SCRIPT ...

torchrun itself reports the first failed rank only as formatted text in its log. Everything else
works as in torchrun.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from psutil import STATUS_STOPPED, STATUS_TRACING_STOP, Error, Process

from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.run_folder import RunFolder


def main() -> int:
    """Run torchrun; return its exit code, or the exit code of the first failed rank."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report = Path(sys.argv[1])
    grace_s = float(sys.argv[2])
    arguments = sys.argv[3:]
    # Kill only the ranks and their children, because torchrun has yet to report the failure.
    killer = threading.Timer(
        grace_s, lambda: runs.end(Process().children(recursive=True))
    )
    killer.daemon = True
    # The report for this host's agent: the rank that exited first, and the ranks that were stopped
    # by SIGSTOP.
    failure: dict[str, object] = {}

    def bound_the_end(record: logging.LogRecord) -> bool:
        if record.funcName == "_close" and "stopped" not in failure:
            # Check before torchrun sends its first signal, because afterwards, a stopped rank
            # cannot be distinguished from one that exits slowly.
            failure["stopped"] = stopped_ranks()
            killer.start()
        return True

    # torchrun logs a warning in `_close` before it asks its ranks to exit, and then waits 30 s for
    # them. Since PyTorch 2.12, it waits for the time set here if no rank has failed. The filter
    # sees the warning and starts our own timer, which shortens the wait but cannot lengthen it.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(30, math.ceil(grace_s)))
    # Filters see only records that pass the logger's level.
    api.logger.setLevel(logging.WARNING)
    api.logger.addFilter(bound_the_end)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        failure.update(rank=rank, local_rank=first.local_rank, exit_code=first.exitcode)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except api.SignalException as error:
        return 128 + int(error.sigval)
    finally:
        if failure:
            # The disk may be full, which may also be why the rank failed.
            with suppress(OSError), RunFolder.open(report.parent) as folder:
                folder.write_json(report.name, failure)
    return 0


def stopped_ranks() -> list[dict[str, int]]:
    """Return this process's ranks that were stopped by SIGSTOP or a debugger."""
    stopped = []
    for process in Process().children():
        # The process may have exited already, or may not be a rank.
        with suppress(Error, KeyError, ValueError):
            if process.status() in (STATUS_STOPPED, STATUS_TRACING_STOP):
                variables = process.environ()
                rank, local_rank = int(variables["RANK"]), int(variables["LOCAL_RANK"])
                stopped.append(
                    {"rank": rank, "local_rank": local_rank, "pid": process.pid}
                )
    return stopped


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All workers have exited, so torch's shutdown would only delay the report.
    os._exit(code)
