"""A run may change its schedule at every checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from .capture import GPT, PP2, PP4, train

LEGS = [
    PP2 + "--pipeline-schedule gpipe ",
    PP4 + "--enable-bitpipe-schedule ",
    PP2 + "--pipeline-schedule 1f1b --use-dpp ",
    PP2 + "--pipeline-schedule zb-v ",
    PP2 + "--pipeline-schedule interleaved ",
    PP4 + "--pipeline-schedule dualpipe ",
    PP2 + "--pipeline-schedule zb-h1 ",
    PP2 + "--pipeline-schedule v-half ",
    PP2,
    PP2 + "--pipeline-schedule dualpipe-v ",
]
"""All on four ranks with two replicas of the model, as Megatron counts them."""


@pytest.mark.slow
@pytest.mark.timeout(600)  # eleven runs
def test_each_step_under_another_schedule(tmp_path: Path) -> None:
    """Ten steps under ten schedules end with the parameters of ten steps under Megatron's own."""
    flags = (
        f"{GPT}--train-iters {len(LEGS)} --num-layers 8 --global-batch-size 16 --clip-grad 0 "
        f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        f"--dist-ckpt-optim-fully-reshardable "
    )
    whole = train(4, flags + PP2)
    saving = f"--save {tmp_path} --save-interval 1 --exit-interval 1 "
    legs = [
        train(4, f"{flags}{saving}{leg}" + (f"--load {tmp_path} " if position else ""))
        for position, leg in enumerate(LEGS)
    ]
    assert [leg.losses for leg in legs] == [[loss] for loss in whole.losses]
    assert legs[-1].parameters == whole.parameters
    ran = [leg.tables[0].split()[0] if leg.tables else "stock" for leg in legs]
    assert len(set(ran)) == len(LEGS)
