"""Writes Megatron's indexed datasets atomically: complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_ext import files
from megatron_ext.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DatasetWriter", "check_outputs", "output_paths"]


def output_paths(prefix: str, keys: Sequence[str], level: str) -> dict[str, tuple[Path, Path]]:
    """The (`.bin`, `.idx`) files of each key, named as upstream names them."""
    return {
        key: (Path(f"{prefix}_{key}_{level}.bin"), Path(f"{prefix}_{key}_{level}.idx"))
        for key in keys
    }


class DatasetWriter:
    """Writes one indexed dataset for each key, through megatron.core's builder.

    A context manager. It writes temporary files beside the final ones; a normal exit renames them
    into place, any exception removes them. It places the new index last and removes an old index
    first, so a reader never finds an index that does not match its data.

    Args:
        paths: Final files, see `output_paths`.
        dtype: dtype of the token ids on disk.
        overwrite: Whether existing files may be replaced.

    Raises:
        DataError: On entry: a file exists and may not be replaced, or the directory is missing or
            not writable.
    """

    def __init__(
        self,
        paths: dict[str, tuple[Path, Path]],
        dtype: type[np.number[Any]],
        *,
        overwrite: bool = False,
    ) -> None:
        self._paths = paths
        self._dtype = dtype
        self._overwrite = overwrite
        self._stack = contextlib.ExitStack()
        self._scratch: dict[Path, Path] = {}
        self._builders: dict[str, Any] = {}

    def __enter__(self) -> DatasetWriter:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        check_outputs(self._paths, overwrite=self._overwrite)
        with contextlib.ExitStack() as stack:
            for key, (bin_path, idx_path) in self._paths.items():
                for path in (idx_path, bin_path):  # the index is put into place last
                    self._scratch[path] = stack.enter_context(files.replacing(path))
                bin_name = str(self._scratch[bin_path])
                self._builders[key] = IndexedDatasetBuilder(bin_name, dtype=self._dtype)
            self._stack = stack.pop_all()
        return self

    def add(self, key: str, ids: np.ndarray[Any, Any], lengths: list[int]) -> None:
        """Appends one document to the dataset of `key`.

        Args:
            key: One of the keys of `paths`.
            ids: Token ids of the whole document, shape (sum(lengths),).
            lengths: Number of ids of each sentence.
        """
        self._builders[key].add_document(ids, lengths)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            with self._stack:
                self._commit()
            return
        self._close()
        self._stack.__exit__(exc_type, exc, traceback)

    def _commit(self) -> None:
        try:
            for key, (_, idx_path) in self._paths.items():
                self._builders[key].finalize(str(self._scratch[idx_path]))
        finally:
            self._close()
        for _, idx_path in self._paths.values():
            idx_path.resolve().unlink(missing_ok=True)

    def _close(self) -> None:
        for builder in self._builders.values():
            with contextlib.suppress(OSError):  # the disk is full: there is nothing to save
                builder.data_file.close()


def check_outputs(paths: dict[str, tuple[Path, Path]], *, overwrite: bool) -> None:
    """Refuses outputs that exist or cannot be written, before any work is done.

    Raises:
        DataError: See `DatasetWriter`.
    """
    for path in (path for pair in paths.values() for path in pair):
        if not path.parent.is_dir():
            raise DataError(
                f"--output-prefix: directory {path.parent} does not exist; create it "
                f"(mkdir -p {path.parent})"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise DataError(
                f"--output-prefix: directory {path.parent} is not writable; give another prefix"
            )
        if path.exists() and not (files.is_replaceable(path) and os.access(path, os.W_OK)):
            raise DataError(f"{path} cannot be replaced by this user; give another --output-prefix")
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists; give --overwrite to replace it, or another prefix")
