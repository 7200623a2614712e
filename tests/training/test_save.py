"""Checkpoints that cannot be written: one line, and the one before is as it was."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import RankRun, _run_script, skip_where_training_is_in_the_wheel, start_ranks
from tests.training.helpers import MOCK, errors

_FLAGS = MOCK + "--pipeline-model-parallel-size 2 --train-iters 4 --eval-iters 0 --save-interval 2 "
_TRACKER = "latest_checkpointed_iteration.txt"


def train_in_room(room_bytes: int | None, argv: Sequence[str]) -> None:
    """Train with files that may have this size only, which stands for a full disk."""
    if room_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    _run_script("pretrain_gpt.py", argv, embedded=True)


def train(flags: str, room_bytes: int | None = None) -> RankRun:
    skip_where_training_is_in_the_wheel()
    return start_ranks(2, train_in_room, room_bytes, (_FLAGS + flags).split())


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save = f"--save {tmp_path} --load {tmp_path} "
    first = train(save + "--exit-interval 2")
    assert first.exit_codes == [0, 0], first.describe()
    before = content(tmp_path)
    (line,) = errors(train(save, room_bytes=60_000))
    assert f"{tmp_path}/iter_0000004 cannot be written: " in line
    after = content(tmp_path)
    assert {name: after[name] for name in before} == before
    again = train(save)
    assert again.exit_codes == [0, 0], again.describe()
    assert (tmp_path / _TRACKER).read_text() == "4"


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    (line,) = errors(train("--save /proc/x"))
    assert "/proc/x/iter_0000002 cannot be written: No such file or directory" in line


def test_another_plan_of_learning_rates_is_one_line(tmp_path: Path) -> None:
    saved = train(f"--save {tmp_path} --exit-interval 2")
    assert saved.exit_codes == [0, 0], saved.describe()
    (line,) = errors(train(f"--load {tmp_path} --train-iters 8"))
    assert "--override-opt-param-scheduler" in line
    overridden = train(f"--load {tmp_path} --train-iters 8 --override-opt-param-scheduler")
    assert overridden.exit_codes == [0, 0], overridden.describe()
