"""Layouts may leave a chunk without a layer, or a rank without a parameter, as upstream's do."""

from __future__ import annotations

from pathlib import Path

import pytest

from .capture import GPT, PP2, PP4, train
from .test_equality import SHARDED, UNCLIPPED, assert_equal, stock

_FLAGS = GPT + UNCLIPPED
_FIRST_OF_RANK_1 = PP2 + "--pipeline-model-parallel-layout Et||tt|tL "
_ALL_OF_RANK_1 = PP4 + "--pipeline-model-parallel-layout Ett||t|tL "
_EVALUATED = _FLAGS.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 1")


@pytest.mark.parametrize(
    "ours",
    [
        "--pipeline-schedule zb-v ",
        "--pipeline-schedule interleaved ",
        "--pipeline-schedule zb-v --use-dpp --pipeline-transport tcp ",
        "--use-dpp ",
        "--pipeline-transport shm ",
    ],
)
def test_an_empty_first_chunk(ours: str) -> None:
    assert_equal(
        train(2, _FLAGS + _FIRST_OF_RANK_1 + ours), stock(2, _FLAGS + _FIRST_OF_RANK_1)
    )


@pytest.mark.parametrize("ours", ["--pipeline-schedule zb-h1 ", "--use-dpp "])
def test_a_rank_without_parameters(ours: str) -> None:
    assert_equal(
        train(4, _FLAGS + _ALL_OF_RANK_1 + ours), stock(4, _FLAGS + _ALL_OF_RANK_1)
    )


def test_reductions_gathers_and_evaluation() -> None:
    flags = _EVALUATED + SHARDED + _FIRST_OF_RANK_1
    found = train(4, flags + "--pipeline-schedule zb-v ")
    assert found.tables[1:] == ["forward-only"]
    assert_equal(found, stock(4, flags))


@pytest.mark.parametrize("ours", ["", "--use-dpp "])
def test_the_layout_that_a_refusal_recommends(ours: str, tmp_path: Path) -> None:
    layout = f"{PP4}--pipeline-model-parallel-layout E||t|t|t|t||L "
    trace = f"--trace --trace-interval 1 --trace-dir {tmp_path} "
    found = train(4, f"{_FLAGS}{layout}{trace}--pipeline-schedule bitpipe {ours}")
    assert_equal(found, stock(4, _FLAGS + PP2))


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    flags = _FLAGS + SHARDED + "--dist-ckpt-optim-fully-reshardable "
    saving = f"--save {tmp_path} --save-interval 1 --exit-interval 1 "
    legs = [
        _FIRST_OF_RANK_1 + "--pipeline-schedule zb-v ",
        _FIRST_OF_RANK_1 + f"--use-dpp --load {tmp_path} ",
        PP2 + f"--pipeline-schedule 1f1b --load {tmp_path} ",
    ]
    found = [train(4, flags + saving + leg) for leg in legs]
    whole = stock(4, flags + PP2)
    assert [leg.losses for leg in found] == [[loss] for loss in whole.losses]
    assert found[-1].parameters == whole.parameters
