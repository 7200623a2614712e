"""Upstream's scripts in placements whose first and last stage share a rank, from one checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.training.helpers import bert_flags, errors, report
from tests.training.helpers import train as run_training
from tests.upstream_script.runs import DEEPSEEK, GPT, run, save_start

if TYPE_CHECKING:
    from tests.ranks import RankRun

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

PP2 = "--pipeline-model-parallel-size 2 "
ZB_V = PP2 + "--pipeline-schedule zb-v "
BITPIPE = "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule "
# The norm that clips is added up rank by rank: in another order for another placement.
SHORT = GPT.replace("--eval-iters 0", "--eval-iters 2") + "--clip-grad 0 --train-iters 3 "


@pytest.mark.parametrize(
    ("num_ranks", "flags", "theirs", "ours"),
    [
        pytest.param(
            4, "--tensor-model-parallel-size 2 --sequence-parallel ", PP2, ZB_V, id="tied-tp2"
        ),
        pytest.param(2, DEEPSEEK, PP2, ZB_V, id="moe-mtp"),
        pytest.param(
            4, "--num-layers 8 --use-distributed-optimizer --bf16 ", PP2, BITPIPE, id="bitpipe"
        ),
    ],
)
def test_gpt(tmp_path: Path, num_ranks: int, flags: str, theirs: str, ours: str) -> None:
    alone = flags.replace("--tensor-model-parallel-size 2 --sequence-parallel ", "")
    start = save_start(tmp_path, SHORT + alone) + flags
    assert report(run(num_ranks, start + ours)) == report(run(num_ranks, start + theirs))


def test_bert(tmp_path: Path) -> None:
    def bert(num_ranks: int, flags: str) -> RankRun:
        return run_training(num_ranks, flags, script="pretrain_bert.py")

    flags = bert_flags(tmp_path) + "--hidden-dropout 0 --attention-dropout 0 --clip-grad 0 "
    saving = f"--train-iters 1 --lr-warmup-iters 0 --save {tmp_path}/start --save-interval 1 "
    report(bert(1, f"{flags}{saving}--no-save-optim --no-save-rng"))
    start = f"{flags} --load {tmp_path}/start --finetune "
    ours, theirs = (report(bert(2, start + pp)) for pp in (ZB_V, PP2))
    assert ours == theirs


@pytest.mark.parametrize(("saved", "resumed"), [(ZB_V, PP2), (PP2, ZB_V)], ids=["from-v", "to-v"])
def test_resume_under_another_schedule(tmp_path: Path, saved: str, resumed: str) -> None:
    flags = SHORT + "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    report(run(2, f"{flags}{saved} --save {tmp_path} --save-interval 2 --exit-interval 2"))
    went_on, elsewhere = (
        report(run(2, f"{flags}{pp}--load {tmp_path}")) for pp in (saved, resumed)
    )
    assert elsewhere == went_on


def test_optimizer_state_of_other_stages_is_refused(tmp_path: Path) -> None:
    flags = SHORT + "--use-distributed-optimizer --eval-iters 0 "
    report(run(2, f"{flags}{PP2}--train-iters 2 --save {tmp_path} --save-interval 2"))
    told = errors(run(2, f"{flags}{ZB_V}--load {tmp_path}"))
    assert "fits only the stages that it was saved with" in told[0]


@pytest.mark.skipif(
    (3, 11) <= sys.version_info < (3, 11, 4),
    reason="this Python writes enums into these files that Megatron cannot load",
)
def test_files_by_rank_are_refused(tmp_path: Path) -> None:
    """The format that has one file for each rank would put weights into other layers."""
    by_rank = f"--ckpt-format torch --train-iters 2 --save {tmp_path} --save-interval 2 "
    report(run(2, f"{SHORT}{PP2}--eval-iters 0 {by_rank}"))
    told = errors(run(2, f"{SHORT}{ZB_V}--finetune --load {tmp_path}"))
    assert "is of format legacy" in told[0]
