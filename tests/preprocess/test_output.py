"""Outputs appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import DataError
from megatron_ext.preprocess.output import datasets, output_paths


def write(prefix: Path, value: int, *, overwrite: bool = False, fail: bool = False) -> None:
    paths = output_paths(str(prefix), ["text"], "document")
    with datasets(paths, np.uint16, overwrite=overwrite) as builders:
        builders["text"].add_document(np.full(3, value, dtype=np.uint16), [1, 2])
        if fail:
            raise KeyboardInterrupt


def read(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [item.tolist() for item in IndexedDataset(f"{prefix}_text_document")]


def test_the_files_are_read_by_megatron(tmp_path: Path) -> None:
    write(tmp_path / "p", 5)
    assert read(tmp_path / "p") == [[5], [5, 5]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p_text_document.bin",
        "p_text_document.idx",
    ]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "p", 5, fail=True)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_replaced_only_if_asked(tmp_path: Path) -> None:
    write(tmp_path / "p", 5)
    with pytest.raises(DataError, match=r"p_text_document\.bin exists; give --overwrite"):
        write(tmp_path / "p", 6)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "p", 6, overwrite=True, fail=True)
    assert read(tmp_path / "p") == [[5], [5, 5]]
    write(tmp_path / "p", 6, overwrite=True)
    assert read(tmp_path / "p") == [[6], [6, 6]]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent does not exist; create it \(mkdir -p"):
        write(tmp_path / "absent" / "p", 5)


def test_links_are_followed_and_stay_links(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    for ending in ("bin", "idx"):
        name = f"p_text_document.{ending}"
        (tmp_path / name).symlink_to(f"large/{name}")
    write(tmp_path / "p", 5)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "p", 6, overwrite=True, fail=True)
    assert read(tmp_path / "p") == [[5], [5, 5]]
    write(tmp_path / "p", 6, overwrite=True)
    assert read(tmp_path / "p") == [[6], [6, 6]]
    assert all(path.is_symlink() for path in tmp_path.glob("p_*"))
    assert sorted(path.suffix for path in (tmp_path / "large").iterdir()) == [".bin", ".idx"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p_text_document.bin")
    with pytest.raises(DataError, match=r"document\.bin cannot be replaced by this user"):
        write(tmp_path / "p", 5, overwrite=True)
    assert (tmp_path / "p_text_document.bin").is_fifo()
