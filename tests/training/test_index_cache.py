"""Indices of datasets on a disk that fills up, or that is of somebody else."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import (
    RankRun,
    _run_script,
    losses,
    skip_where_training_is_in_the_wheel,
    start_ranks,
)

from .helpers import GPT, bert_flags, errors, write_dataset

_PP2 = "--pipeline-model-parallel-size 2 --eval-iters 0 --train-iters 2 "
_ROOM_BYTES = 60_000
_FEW, _MANY = 100, 20_000


def train_in_room(script: str, argv: Sequence[str], room_bytes: int | None) -> None:
    """Train with files that may have this size only, which stands for a full disk."""
    if room_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    _run_script(script, argv, embedded=True)


def train(flags: str, room_bytes: int | None = None, script: str = "pretrain_gpt.py") -> RankRun:
    skip_where_training_is_in_the_wheel()
    return start_ranks(2, train_in_room, script, flags.split(), room_bytes)


def dataset(prefix: Path, documents: int) -> str:
    return write_dataset(prefix, [[[n % 97, (n + 1) % 97, 99]] for n in range(documents)])


@pytest.mark.parametrize("blended", [False, True], ids=["one", "blended"])
def test_a_full_disk_is_one_line_and_leaves_no_half_index(tmp_path: Path, blended: bool) -> None:
    big, cache = dataset(tmp_path / "big", _MANY), tmp_path / "cache"
    data = f"1 {dataset(tmp_path / 'few', _FEW)} 1 {big}" if blended else big
    flags = f"{GPT}{_PP2}--data-path {data} --split 100,0,0 --data-cache-path {cache} "
    (line,) = errors(train(flags, _ROOM_BYTES))
    assert f"{cache} cannot be written: " in line
    assert "--data-cache-path" in line
    for path in cache.glob("*.npy"):
        np.load(path, mmap_mode="r")
    again = train(flags)
    assert again.exit_codes == [0, 0], again.describe()
    assert len(losses(again.logs)) == 2


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", _FEW)
    (line,) = errors(
        train(f"{GPT}{_PP2}--data-path {data} --split 100,0,0 --data-cache-path /proc/x")
    )
    assert "/proc/x cannot be written: No such file or directory" in line


def test_indices_beside_the_data_need_a_folder_too(tmp_path: Path) -> None:
    """Without --data-cache-path megatron.core makes a folder with the name of the dataset."""
    data = dataset(tmp_path / "data", _FEW)
    Path(data).write_text("in the way")
    (line,) = errors(train(f"{GPT}{_PP2}--data-path {data} --split 100,0,0"))
    assert f"{data}/cache" in line
    assert "give --data-cache-path" in line


def test_bert_too(tmp_path: Path) -> None:
    flags = f"{bert_flags(tmp_path)}{_PP2}--data-cache-path /proc/x"
    (line,) = errors(train(flags, script="pretrain_bert.py"))
    assert "/proc/x cannot be written: " in line
