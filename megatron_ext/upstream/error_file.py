"""Writes the file from which torchrun reads why a rank failed."""

from __future__ import annotations

import traceback

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from megatron_ext.upstream import cause


class WholeErrorFile(ErrorHandler):
    """torch's error handler, writing the file atomically and with the cause for the launcher."""

    def record_exception(self, e: BaseException) -> None:
        """Write the exception that stops this rank."""
        cause.write(cause.of_error(e), "".join(traceback.format_exception(e)))
