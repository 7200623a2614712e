"""TensorBoard on a disk that fills up."""

from __future__ import annotations

import resource
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.training.board import make_writer
from tests.ranks import (
    RankRun,
    _run_script,
    losses,
    run_ranks,
    skip_where_training_is_in_the_wheel,
    start_ranks,
)
from tests.scalars import written_scalars

from .helpers import MOCK

_ITERATIONS = 60
_ROOM_BYTES = 16 << 10
_FLAGS = f"{MOCK}--train-iters {_ITERATIONS} --log-interval {_ITERATIONS} --eval-iters 0 "


def train_in_room(room_bytes: int | None, argv: Sequence[str]) -> None:
    """Train with files that may have this size only, which stands for a full disk."""
    if room_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    _run_script("pretrain_gpt.py", argv, embedded=True)


def train(flags: str, room_bytes: int | None = None) -> RankRun:
    skip_where_training_is_in_the_wheel()
    run = start_ranks(1, train_in_room, room_bytes, (_FLAGS + flags).split())
    assert run.exit_codes == [0], run.describe()
    return run


def test_training_goes_on_without_scalars(tmp_path: Path) -> None:
    run = train(f"--tensorboard-dir {tmp_path}", _ROOM_BYTES)
    [log] = run.logs
    assert "Traceback" not in log
    [line] = [line for line in log.splitlines() if "cannot be written" in line]
    assert f"--tensorboard-dir {tmp_path} cannot be written: " in line
    assert "training continues" in line
    assert losses(run.logs) == losses(train("").logs)
    steps = [step for step, _ in written_scalars(tmp_path)["lm loss"]]
    assert steps == list(range(1, len(steps) + 1))
    assert 1 < len(steps) < _ITERATIONS


def make_writer_in_room(folder: Path, room_bytes: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    try:
        make_writer(Namespace(tensorboard_dir=str(folder), rank=0, world_size=1))
    except UserError as error:
        return str(error)
    return "made"


def test_a_disk_that_is_full_already_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    [told] = run_ranks(1, make_writer_in_room, tmp_path, 1000)
    assert told.startswith(f"--tensorboard-dir {tmp_path} cannot be written: ")
    assert len(told.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
