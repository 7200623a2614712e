"""torchrun with a report that a program can read: which rank failed first, and how.

    python -m megatron_ext.launch.elastic REPORT.json TORCHRUN_FLAGS SCRIPT ...

torchrun itself tells this as a drawing in its log. Everything else is torchrun's own.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["main"]


def main() -> int:
    """Run torchrun; return its exit code, that of the first failed rank if one failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report, arguments = Path(sys.argv[1]), sys.argv[2:]
    try:
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
            report.write_text(json.dumps(found), encoding="utf-8")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all workers are gone; taking torch apart would only delay the report
