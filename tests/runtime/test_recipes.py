"""Recipes as people publish them train under a schedule with the log of Megatron's own.

One small training for each rule: the flags that a recipe has for Megatron's schedule stay in the
command line of ours. Runs start from one checkpoint and do not clip gradients, whose norm is added
up rank by rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_placed_training import EIGHT_LAYERS, EXACT, PP2, ZB_V, start_from
from tests.training.helpers import MOCK, report, train

PP2_VPP2 = PP2 + "--num-virtual-stages-per-pipeline-rank 2 "
FIVE_LAYERS = "--num-layers 5 "
ZB_H1 = PP2 + "--pipeline-schedule zb-h1 "


@pytest.mark.parametrize(
    ("flags", "cut", "ours"),
    [
        pytest.param(
            "--num-layers 6 ",
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split ",
            ZB_V,
            id="embedding and loss",
        ),
        pytest.param(FIVE_LAYERS, "--decoder-first-pipeline-num-layers 2 ", ZB_V, id="ends"),
        pytest.param(
            EIGHT_LAYERS,
            "--num-virtual-stages-per-pipeline-rank 4 ",
            ZB_H1,
            id="chunks of a line",
        ),
        pytest.param(
            FIVE_LAYERS,
            "--pipeline-model-parallel-layout Et|t|t|t|t|L ",
            ZB_V,
            id="layout of more stages",
        ),
    ],
)
def test_the_cut_follows_the_schedule(tmp_path: Path, flags: str, cut: str, ours: str) -> None:
    flags = start_from(tmp_path, MOCK + flags + EXACT) + cut
    assert report(train(2, flags + ours)) == report(train(2, flags + PP2))
