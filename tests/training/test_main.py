"""Whole runs of the embedded trainer: resuming, exiting, and what a user may get wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import losses

from .helpers import GPT, LLAMA, MOCK, NO_DROPOUT, bert_flags, errors, gpt_dataset, report, train

FOUR = MOCK.replace("--train-iters 3", "--train-iters 4")
PP2 = "--pipeline-model-parallel-size 2 "
TP2 = "--tensor-model-parallel-size 2 "


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of iteration 2 of a run without dropout, made on one rank."""
    directory = tmp_path_factory.mktemp("saved")
    run = train(1, f"{FOUR}{NO_DROPOUT}--save {directory} --save-interval 2 --exit-interval 2")
    assert len(losses(run.logs)) == 2, "--exit-interval ends the run"
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (directory / "iter_0000002" / "common.pt").is_file()
    return directory


# The vocabulary is padded for the tensor-parallel size unless its padded size is given.
WHOLE = f"{FOUR}{NO_DROPOUT}--padded-vocab-size 128 --log-interval 2 "


@pytest.fixture(scope="module")
def straight() -> float:
    """The mean loss of iterations 3 and 4 of the same run, not interrupted."""
    return losses(train(1, WHOLE).logs)[-1]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(1, "", id="same"),
        pytest.param(2, PP2 + "--num-layers-per-virtual-pipeline-stage 1", id="vpp2"),
        pytest.param(2, TP2, id="tp2"),
        pytest.param(2, "", id="dp2"),
    ],
)
def test_resuming_with_other_parallel_sizes_goes_on(
    saved: Path, straight: float, num_ranks: int, flags: str
) -> None:
    resumed = losses(train(num_ranks, f"{WHOLE}{flags} --load {saved}").logs)[-1]
    assert resumed == pytest.approx(straight, rel=1e-5)


def test_a_finished_run_can_be_started_again(tmp_path: Path) -> None:
    data = gpt_dataset(tmp_path / "data")
    flags = (
        f"{GPT}--data-path {data} --split 80,10,10 --data-cache-path {tmp_path}/cache "
        f"--save {tmp_path}/save --load {tmp_path}/save --save-interval 3 "
    )
    first, again = report(train(2, flags)), report(train(2, flags))
    assert len([line for line in first if line.startswith(" iteration")]) == 3
    assert [line for line in again if line.startswith(" iteration")] == []
    assert again[-2:] == first[-2:], "validation and test of the loaded weights"


@pytest.mark.parametrize(
    ("num_ranks", "flags", "parts"),
    [
        pytest.param(
            2, GPT + "--data-path /absent/x --split 90,5,5", ["/absent/x.idx"], id="no data"
        ),
        pytest.param(
            1, MOCK + "--tokenizer-type GPT2BPETokenizer", ["--vocab-file"], id="no vocabulary"
        ),
        pytest.param(
            1,
            MOCK + "--tokenizer-type SentencePieceTokenizer --tokenizer-model /absent/x.model",
            ["/absent/x.model"],
            id="no tokenizer",
        ),
        pytest.param(
            1,
            f"{MOCK}--save {__file__}/save --save-interval 1",
            [f"--save {__file__}/save", "is not a directory"],
            id="no save",
        ),
        pytest.param(
            2,
            f"{MOCK}--tensorboard-dir {__file__}/board",
            [f"--tensorboard-dir {__file__}/board cannot be written: Not a directory"],
            id="no board",
        ),
        pytest.param(
            2,
            MOCK + "--load /absent --exit-on-missing-checkpoint",
            ["--load /absent", "latest_checkpointed_iteration.txt"],
            id="no checkpoint",
        ),
    ],
)
def test_what_is_missing_is_named_once(num_ranks: int, flags: str, parts: list[str]) -> None:
    (line,) = errors(train(num_ranks, flags))
    for part in parts:
        assert part in line


def test_a_split_that_is_too_small_is_refused(tmp_path: Path) -> None:
    data = gpt_dataset(tmp_path / "data", documents=3)
    (line,) = errors(train(2, f"{GPT}--data-path {data} --split 90,5,5"))
    assert "3 documents are too few for --split 90,5,5" in line


def test_a_checkpoint_of_another_model_is_refused_with_both_values(saved: Path) -> None:
    (line,) = errors(train(2, f"{FOUR}{LLAMA}--num-layers 2 {PP2}--load {saved}"))
    assert "num_layers is 4 there and 2 here" in line
    assert "normalization is LayerNorm there and RMSNorm here" in line


def test_gpt_does_not_load_into_bert(saved: Path, tmp_path: Path) -> None:
    flags = bert_flags(tmp_path) + f"--padded-vocab-size 128 --load {saved}"
    (line,) = errors(train(1, flags, script="pretrain_bert.py"))
    assert f"{saved}/iter_0000002" in line


def _flipped(content: bytes) -> bytes:
    """Flip bits at 50 places, the first byte among them."""
    places = range(0, len(content), -(-len(content) // 50))
    return bytes(byte ^ (0xFF if at in places else 0) for at, byte in enumerate(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(_flipped(path.read_bytes())),
    "removed": Path.unlink,
}
CHECKPOINT_FILES = (
    "iter_0000002/.metadata",
    "iter_0000002/__0_0.distcp",
    "iter_0000002/__0_1.distcp",
    "iter_0000002/common.pt",
    "iter_0000002/metadata.json",
    "latest_checkpointed_iteration.txt",
)


def test_every_file_of_a_checkpoint_is_damaged_below(saved: Path) -> None:
    found = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert found == set(CHECKPOINT_FILES)


def every_damage_of_every_file() -> Iterator[Any]:
    """Yield all pairs; half are quick, in which each file has two damages and each damage three."""
    for row, name in enumerate(CHECKPOINT_FILES):
        for column, damage in enumerate(DAMAGES):
            marks = [pytest.mark.slow] if (row + column) % 2 else []
            yield pytest.param(name, damage, id=f"{name}-{damage}", marks=marks)


@pytest.mark.parametrize(("name", "damage"), [*every_damage_of_every_file()])
def test_a_damaged_checkpoint_is_refused(
    saved: Path, tmp_path: Path, name: str, damage: str
) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    DAMAGES[damage](tmp_path / "copy" / name)
    flags = f"{FOUR}{NO_DROPOUT}--load {tmp_path}/copy --exit-on-missing-checkpoint"
    (line,) = errors(train(2, flags))
    assert f"{tmp_path}/copy" in line
    assert re.search("damaged|no checkpoint of an iteration|no latest_checkpointed", line)


def test_optimizer_state_that_cannot_be_resharded_is_refused(tmp_path: Path) -> None:
    flags = f"{FOUR}--use-distributed-optimizer "
    train(1, f"{flags}--save {tmp_path} --save-interval 2 --exit-interval 2")
    (line,) = errors(train(2, f"{flags}{PP2}--load {tmp_path}"))
    assert "--dist-ckpt-optim-fully-reshardable" in line
    assert len(losses(train(2, f"{flags}{PP2}--load {tmp_path} --no-load-optim").logs)) == 2


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    (line,) = errors(train(1, f"{MOCK}--lr 1e38 --clip-grad 0 --optimizer sgd"))
    assert "the loss of a micro-batch is nan: lower --lr" in line


def test_nothing_is_left_behind_by_a_refused_run(tmp_path: Path) -> None:
    errors(
        train(
            1,
            f"{MOCK}--save {tmp_path}/new/save --save-interval 1 --load {tmp_path}/absent "
            f"--tensorboard-dir {tmp_path}/board --exit-on-missing-checkpoint",
        )
    )
    assert list(tmp_path.iterdir()) == []
