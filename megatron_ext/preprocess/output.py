"""Writes Megatron's indexed datasets atomically: complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import files
from megatron_ext.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["check_outputs", "datasets", "output_paths"]


def output_paths(prefix: str, keys: Sequence[str], level: str) -> dict[str, tuple[Path, Path]]:
    """The (`.bin`, `.idx`) files of each key, named as upstream names them."""
    return {
        key: (Path(f"{prefix}_{key}_{level}.bin"), Path(f"{prefix}_{key}_{level}.idx"))
        for key in keys
    }


@contextmanager
def datasets(
    paths: dict[str, tuple[Path, Path]], dtype: type[np.number[Any]], *, overwrite: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield megatron.core's builder of an indexed dataset for each key.

    Writes temporary files beside the final ones; a normal exit renames them into place, any
    exception removes them. It places the new index last and removes an old index first, so a reader
    never finds an index that does not match its data.

    Args:
        paths: Final files, see `output_paths`.
        dtype: dtype of the token ids on disk.
        overwrite: Whether existing files may be replaced.

    Raises:
        DataError: On entry: a file exists and may not be replaced, or the directory is missing or
            not writable.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    check_outputs(paths, overwrite=overwrite)
    with ExitStack() as stack:
        scratch = {
            path: stack.enter_context(files.replacing(path))
            for bin_path, idx_path in paths.values()
            for path in (idx_path, bin_path)  # the index is put into place last
        }
        builders = {
            key: IndexedDatasetBuilder(str(scratch[bin_path]), dtype=dtype)
            for key, (bin_path, _) in paths.items()
        }
        try:
            yield builders
            for key, (_, idx_path) in paths.items():
                builders[key].finalize(str(scratch[idx_path]))
        finally:
            for builder in builders.values():
                with suppress(OSError):  # the disk is full: there is nothing to save
                    builder.data_file.close()
        for _, idx_path in paths.values():
            idx_path.resolve().unlink(missing_ok=True)


def check_outputs(paths: dict[str, tuple[Path, Path]], *, overwrite: bool) -> None:
    """Refuses outputs that exist or cannot be written, before any work is done.

    Raises:
        DataError: See `datasets`.
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
