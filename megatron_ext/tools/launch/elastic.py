"""torchrun with a machine-readable report, and a bound on the time that it takes to end.

    python -m megatron_ext.tools.launch.elastic REPORT.json GRACE_S TORCHRUN_FLAGS SCRIPT ...

torchrun itself reports the first failed rank as a drawing in its log. All else is torchrun's own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from megatron_ext.tools.launch import runs


def _end_within(grace_s: float) -> None:
    """Kill the remaining ranks when the grace period after a rank's failure ends.

    torchrun gives them 30 s, and has no setting for it.
    """
    failed = False
    while not failed:
        time.sleep(0.1)
        with suppress(ChildProcessError):  # torchrun has not started them yet
            # Leaves the exit code to torchrun.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            failed = ended is not None and ended.si_status != 0
    time.sleep(grace_s)
    runs.end(runs.descendants(os.getpid()))


def main() -> int:
    """Run torchrun; return its exit code, that of the first failed rank if one failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report, grace_s, arguments = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    threading.Thread(target=_end_within, args=(grace_s,), daemon=True).start()
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        with suppress(OSError):  # a full disk, which may be why the rank failed
            about = {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode}
            runs.write_json(report, about)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all workers have exited; torch's shutdown would only delay the report
