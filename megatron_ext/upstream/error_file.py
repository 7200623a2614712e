"""Writes the file that tells torchrun why a rank failed."""

from __future__ import annotations

import traceback

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from megatron_ext.upstream import cause


class WholeErrorFile(ErrorHandler):
    """torch's error handler, but with atomic writes and the cause for the launcher."""

    def record_exception(self, e: BaseException) -> None:
        """Write the exception that stops this rank."""
        ending = cause.of_error(e)
        callstack = "".join(traceback.format_exception(e))
        cause.write(ending, callstack)
