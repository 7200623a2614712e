"""The file from which torchrun reads why a rank failed."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

_PATH = "TORCHELASTIC_ERROR_FILE"


class WholeErrorFile(ErrorHandler):
    """Writes the file whole or not at all.

    When a rank is killed, its peers fail, and torchrun sends them SIGTERM while they write. Half a
    file ends torchrun with a traceback of its own, and its report of the first failure is lost.
    """

    def record_exception(self, e: BaseException) -> None:
        """Write the exception that ends this rank."""
        path = os.environ.get(_PATH)
        if not path:
            super().record_exception(e)
            return
        os.environ[_PATH] = part = f"{path}.part"
        super().record_exception(e)
        Path(part).replace(path)
