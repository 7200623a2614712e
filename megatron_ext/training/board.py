"""TensorBoard's files. A full disk ends the scalars, not the training."""

from __future__ import annotations

import logging
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError
from megatron_ext.files import cannot_write

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["make_writer"]

logger = logging.getLogger(__name__)

_FIRST_BYTES = 4096
"""Free space that a folder needs for a new event file."""


def make_writer(args: Namespace) -> SummaryWriter | None:
    """Open TensorBoard on the last rank, if a directory was given.

    Raises:
        UserError: TensorBoard is not installed, or cannot write there.
    """
    if not args.tensorboard_dir or args.rank != args.world_size - 1:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "--tensorboard-dir needs TensorBoard: pip install tensorboard, or leave the flag out"
        ) from error
    folder = Path(args.tensorboard_dir)
    try:
        if "://" not in args.tensorboard_dir:
            _try_out(folder)
        writer = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=1000)
    except OSError as error:
        remedy = "give another with room, or leave the flag out"
        raise UserError(f"--tensorboard-dir {cannot_write(folder, error, remedy)}") from error
    # TensorBoard writes in a separate thread, whose errors would end as a traceback.
    files: Any = writer.file_writer
    events = files.event_writer._async_writer
    events._writer = events._worker._record_writer = _UntilFull(events._writer, folder)
    return writer


def _try_out(folder: Path) -> None:
    """Write a temporary file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_FIRST_BYTES))


class _UntilFull:
    """Writes TensorBoard's records until a write fails; then warns once and drops the rest."""

    def __init__(self, records: Any, folder: Path) -> None:
        self._records = records
        self._folder = folder
        self._failed = False

    def write(self, data: bytes) -> None:
        """Write one event."""
        self._attempt("write", data)

    def flush(self) -> None:
        """Write what is buffered."""
        self._attempt("flush")

    def close(self) -> None:
        """Close the file."""
        self._attempt("close")

    def _attempt(self, method: str, *data: bytes) -> None:
        if self._failed:
            return
        try:
            getattr(self._records, method)(*data)
        except OSError as error:
            self._failed = True
            remedy = "training continues without scalars; make room, or give another"
            logger.warning("--tensorboard-dir %s", cannot_write(self._folder, error, remedy))
