"""Builds datasets whose indices are cached on a disk, which may be full or not writable.

In megatron.core rank 0 writes the indices while the others wait in a barrier, which they never
leave if rank 0 fails. Here the ranks agree on the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron_ext.errors import DataError
from megatron_ext.files import cannot_write
from megatron_ext.training.initialize import agreed

if TYPE_CHECKING:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

__all__ = ["IndexedBuilder"]


class IndexedBuilder(BlendedMegatronDatasetBuilder):
    """Builds datasets on rank 0, which writes their indices, and then on the others. Collective."""

    def build(self) -> list[Any]:
        """Return the datasets of training, validation and test.

        Raises:
            DataError: The indices cannot be written on rank 0, or another rank does not find
                them. No partial index remains.
        """
        built: list[Any] = []
        for is_first in (True, False):
            with agreed(), _keeping_indices(self.config):
                if (dist.get_rank() == 0) == is_first:
                    built = super().build()
        return built

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list[Any], sizes: list[list[int]]
    ) -> list[list[Any]]:
        """Return the datasets of each split, one for each prefix, one after the other."""
        parts = [
            self._build_megatron_dataset_splits(prefix, split, wanted, synchronize_ranks=False)
            for prefix, wanted in zip(prefixes, sizes, strict=True)
        ]
        return [list(column) for column in zip(*parts, strict=True)]

    def _build_megatron_dataset_splits(
        self,
        dataset_path: str | None,
        split: list[Any],
        sizes: list[int],
        synchronize_ranks: bool = True,
    ) -> list[Any]:
        parts: list[Any] = super()._build_megatron_dataset_splits(
            dataset_path, split, sizes, synchronize_ranks=False
        )
        return parts

    @staticmethod
    def build_generic_dataset(
        dataset: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build one dataset if this rank needs it; `build` lets the ranks take turns."""
        del synchronize_ranks
        return dataset(*args) if is_built_on_rank() else None


@contextmanager
def _keeping_indices(config: BlendedMegatronDatasetConfig) -> Iterator[None]:
    """Translate a failure to write indices, and remove partial files."""
    try:
        yield
    except OSError as error:
        folders = _folders(config)
        for path in (path for folder in folders for path in folder.glob("*.npy")):
            if _is_cut_off(path):  # the next run would take it for whole
                path.unlink(missing_ok=True)
        where = Path(config.path_to_cache or error.filename or folders[0])
        if not error.strerror:  # numpy's
            error = OSError(f"only a part fits ({error})")
        remedy = "make room, or give --data-cache-path a folder with room that you may write"
        raise DataError(cannot_write(where, error, remedy)) from error


def _folders(config: BlendedMegatronDatasetConfig) -> Sequence[Path]:
    """Return where megatron.core keeps indices."""
    if config.path_to_cache is not None:
        return [Path(config.path_to_cache)]
    prefixes = config.blend[0] if config.blend else []
    return [path for prefix in prefixes for path in Path(prefix, "cache").glob("*_indices")]


def _is_cut_off(path: Path) -> bool:
    """Return whether an index is shorter than its header says."""
    try:
        np.load(path, mmap_mode="r")
    except (EOFError, ValueError):
        return True
    return False
