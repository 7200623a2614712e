"""`--iterations-to-skip` under upstream's script: the batches of an iteration go by unused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patches.single import without
from tests.ranks import _run_script, start_ranks
from tests.training.helpers import report
from tests.upstream_script.runs import GPT, TIMEOUT_S, run, save_start

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "
# The norm that clips is added up rank by rank: in another order for another placement.
FLAGS = GPT + "--num-layers 8 --global-batch-size 16 --clip-grad 0 --train-iters 4 "
SKIPPING = FLAGS + "--iterations-to-skip 1 2 "


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the flags that start any run from one checkpoint."""
    path: Path = tmp_path_factory.mktemp("start")
    save_start(path, FLAGS)
    return f"{SKIPPING} --load {path} --finetune "


def _as_upstream_skips(argv: Sequence[str]) -> None:
    with without("schedules.skipped_iterations"):
        _run_script("pretrain_gpt.py", argv)


@pytest.fixture(scope="module")
def unpipelined(start: str) -> list[str]:
    """Training of one process, where upstream's own way to skip works."""
    lines = report(
        start_ranks(1, _as_upstream_skips, start.split(), timeout_s=TIMEOUT_S)
    )
    # 0.16 counted from 0 what later releases count from 1.
    logged = [line.split("/")[0].split()[-1] for line in lines]
    assert logged in (["1", "4"], ["3", "4"])
    return lines


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(PP2 + "--pipeline-schedule zb-v ", id="zb-v"),
        pytest.param(PP4 + "--pipeline-schedule v-half --use-dpp ", id="v-half-dpp"),
        pytest.param(PP4 + "--pipeline-schedule 1f1b ", id="stages-without-data"),
        pytest.param(
            PP2 + "--num-layers-per-virtual-pipeline-stage 2 ", id="megatrons-chunks"
        ),
        pytest.param(
            PP2 + "--tensor-model-parallel-size 2 --pipeline-schedule zb-v ",
            id="tp2-zb-v",
        ),
    ],
)
def test_losses_are_those_of_one_process(
    start: str, unpipelined: list[str], ours: str
) -> None:
    num_ranks = 4 if PP4 in ours or "tensor" in ours else 2
    assert _losses(report(run(num_ranks, start + ours))) == pytest.approx(
        _losses(unpipelined), rel=1e-6
    )


def test_twins(start: str) -> None:
    bitpipe, stock = (
        report(run(4, start + ours))
        for ours in (PP4 + "--enable-bitpipe-schedule ", PP2)
    )
    assert bitpipe == stock


def _losses(lines: list[str]) -> list[float]:
    return [float(line.split("lm loss: ")[1].split()[0]) for line in lines]
