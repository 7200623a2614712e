"""torchrun with a machine-readable report, and a bound on the time that it takes to end.

    python -m megatron_ext.tools.launch.elastic REPORT.json GRACE_S TORCHRUN_FLAGS SCRIPT ...

torchrun itself reports the first failed rank as a drawing in its log. All else is torchrun's own.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from psutil import Process

from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.run_folder import RunFolder


def main() -> int:
    """Run torchrun; return its exit code, that of the first failed rank if one failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report, grace_s, arguments = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    killer = threading.Timer(grace_s, lambda: runs.end(Process().children(recursive=True)))
    killer.daemon = True

    def bound_the_end(record: logging.LogRecord) -> bool:
        if record.funcName == "_close":
            with suppress(RuntimeError):  # it runs already: there is a warning for each rank
                killer.start()
        return True

    # torchrun warns before it asks its ranks to end. It gives them 30 s; from PyTorch 2.12 on more,
    # if this says so and no rank has failed.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(30, math.ceil(grace_s)))
    api.logger.setLevel(logging.WARNING)
    api.logger.addFilter(bound_the_end)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        with suppress(OSError):  # a full disk, which may be why the rank failed
            about = {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode}
            with RunFolder.open(report.parent) as folder:
                folder.write_json(report.name, about)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except api.SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all workers have exited; torch's shutdown would only delay the report
