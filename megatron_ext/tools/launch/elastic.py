"""torchrun with a machine-readable report and a time limit for stopping the other ranks.

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
import time
from contextlib import suppress
from pathlib import Path

from psutil import (
    STATUS_STOPPED,
    STATUS_TRACING_STOP,
    STATUS_ZOMBIE,
    Error,
    Process,
)

from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.run_folder import RunFolder

_REPORT_S = 1.0
"""Time that the other ranks have to report the step in which a rank died without a report."""
_LOOK_S = 0.05
"""Time between checks for a report."""


def main() -> int:
    """Run torchrun; return its exit code, or the exit code of the first failed rank."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report = Path(sys.argv[1])
    grace_s = float(sys.argv[2])
    arguments = sys.argv[3:]
    killer = threading.Timer(grace_s, _kill_ranks)
    killer.daemon = True
    # The report for this host's agent: the rank that exited first, and the ranks that were stopped
    # by SIGSTOP.
    failure: dict[str, object] = {}

    def bound_the_end(record: logging.LogRecord) -> bool:
        if record.funcName == "_close" and "stopped" not in failure:
            # Check before torchrun sends its first signal, because afterwards, a stopped rank
            # cannot be distinguished from one that exits slowly.
            failure["stopped"] = stopped_ranks()
            _await_report()
            killer.start()
        return True

    # torchrun logs a warning in `_close` before it asks its ranks to exit, and then waits 30 s for
    # them. Since PyTorch 2.12, it waits for the time set here if no rank has failed. The filter
    # sees the warning and starts our own timer, which shortens the wait but cannot lengthen it.
    shutdown_s = max(30, math.ceil(grace_s))
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(shutdown_s)
    # Filters see only records that are at or above the logger's level.
    api.logger.setLevel(logging.WARNING)
    api.logger.addFilter(bound_the_end)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode
        failure.update(rank=rank, local_rank=first.local_rank, exit_code=code)
        return code if code > 0 else 128 - code
    except api.SignalException as error:
        return 128 + int(error.sigval)
    finally:
        if failure:
            # The disk may be full, which may also be why the rank failed.
            with suppress(OSError), RunFolder.open(report.parent) as folder:
                folder.write_json(report.name, failure)
    return 0


def _kill_ranks() -> None:
    """Kill only the ranks and their children, because torchrun has yet to report the failure."""
    ranks_and_children = Process().children(recursive=True)
    runs.end(ranks_and_children)


def _await_report() -> None:
    """If a rank died without reporting an error, wait until another rank reports one.

    A rank that was killed cannot report its step. The others can, once they miss its messages,
    but torchrun stops them within 0.1 s.
    """
    reports: list[Path] = []
    num_ranks = num_running = 0
    for process in Process().children():
        # The process may have exited already, or may not be a rank.
        with suppress(Error, KeyError, ValueError):
            if process.status() != STATUS_ZOMBIE:
                variables = process.environ()
                num_ranks = int(variables["LOCAL_WORLD_SIZE"])
                # torchrun creates one folder per rank, named after its local rank.
                rank_folder = Path(variables["TORCHELASTIC_ERROR_FILE"]).parent
                reports = []
                for local_rank in range(num_ranks):
                    other_folder = rank_folder.parent / str(local_rank)
                    reports.append(other_folder / "error.json")
                num_running += 1
    # If all ranks are running, a signal is stopping the job. If none are, nobody can
    # report.
    if num_running in (0, num_ranks):
        return
    deadline = time.monotonic() + _REPORT_S
    while time.monotonic() < deadline:
        if any(report.exists() for report in reports):
            return
        time.sleep(_LOOK_S)


def stopped_ranks() -> list[dict[str, int]]:
    """Return this process's ranks that were stopped by SIGSTOP or a debugger."""
    stopped = []
    for process in Process().children():
        # The process may have exited already, or may not be a rank.
        with suppress(Error, KeyError, ValueError):
            if process.status() in (STATUS_STOPPED, STATUS_TRACING_STOP):
                variables = process.environ()
                stopped_rank = {
                    "rank": int(variables["RANK"]),
                    "local_rank": int(variables["LOCAL_RANK"]),
                    "pid": process.pid,
                }
                stopped.append(stopped_rank)
    return stopped


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All workers have exited, so torch's shutdown would only delay the report.
    os._exit(code)
