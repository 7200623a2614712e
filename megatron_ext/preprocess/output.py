"""Writing Megatron's indexed datasets so that they appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

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

    A context manager. Data goes to temporary files beside the final ones; a normal exit renames
    them into place, any exception removes them. The index goes last and an index that is replaced
    goes first, so a reader never finds an index that does not belong to its data.

    Args:
        paths: Final files, see `output_paths`.
        dtype: Type of the token ids on disk.
        overwrite: Whether existing files may be replaced.

    Raises:
        DataError: On entry, if a file exists and may not be replaced, or the directory is missing
            or cannot be written to.
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
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._builders: dict[str, Any] = {}

    def __enter__(self) -> DatasetWriter:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        check_outputs(self._paths, overwrite=self._overwrite)
        folder = next(iter(self._paths.values()))[0].parent
        self._scratch = tempfile.TemporaryDirectory(prefix=".preprocess-", dir=folder)
        for key, (bin_path, _) in self._paths.items():
            self._builders[key] = IndexedDatasetBuilder(
                str(self._temporary(bin_path)), dtype=self._dtype
            )
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
        assert self._scratch is not None
        try:
            if exc_type is None:
                self._commit()
        finally:
            for builder in self._builders.values():
                with contextlib.suppress(OSError):  # the disk is full: there is nothing to save
                    builder.data_file.close()
            self._scratch.cleanup()

    def _commit(self) -> None:
        for key, (_, idx_path) in self._paths.items():
            self._builders[key].finalize(str(self._temporary(idx_path)))
        for bin_path, idx_path in self._paths.values():
            idx_path.unlink(missing_ok=True)
            self._temporary(bin_path).replace(bin_path)
            self._temporary(idx_path).replace(idx_path)

    def _temporary(self, final: Path) -> Path:
        assert self._scratch is not None
        return Path(self._scratch.name) / final.name


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
            raise DataError(f"--output-prefix: directory {path.parent} is not writable")
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists; give --overwrite to replace it, or another prefix")
