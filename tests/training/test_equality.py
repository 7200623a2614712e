"""The embedded trainer prints, digit for digit, what upstream's own script prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiers import first_quick

from .helpers import (
    GPT,
    LLAMA,
    MLA,
    MOCK,
    MOE,
    NO_DROPOUT,
    NULL,
    SHAPE,
    bert_flags,
    gpt_dataset,
    report,
    train,
)

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

PP2 = "--pipeline-model-parallel-size 2 "
DISTRIBUTED_OPTIMIZER = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--dist-ckpt-optim-fully-reshardable "
)


def same_as_upstream(num_ranks: int, flags: str, script: str = "pretrain_gpt.py") -> None:
    upstream = report(train(num_ranks, flags, script=script, embedded=False))
    assert report(train(num_ranks, flags, script=script)) == upstream


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    first_quick(
        [
            pytest.param(1, MOCK, id="gpt-dropout"),
            pytest.param(1, MOCK + LLAMA + NO_DROPOUT, id="llama"),
            pytest.param(2, MOCK + PP2, id="pp2"),
            pytest.param(2, MOCK + PP2 + "--num-layers-per-virtual-pipeline-stage 1", id="vpp2"),
            pytest.param(
                2, MOCK + LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel", id="tp2-sp"
            ),
            pytest.param(2, MOCK + DISTRIBUTED_OPTIMIZER, id="dp2-distributed-optimizer"),
            pytest.param(
                2,
                MOCK + LLAMA + MOE + "--expert-model-parallel-size 2 --moe-z-loss-coeff 1e-3 "
                "--moe-token-dispatcher-type alltoall",
                id="moe-ep2",
            ),
            pytest.param(
                2,
                MOCK + MLA + MOE + PP2 + "--moe-router-score-function sigmoid "
                "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32",
                id="mla-mtp-moe-pp2",
            ),
            pytest.param(
                1,
                MOCK + "--bf16 --recompute-granularity full --recompute-method uniform "
                "--recompute-num-layers 1",
                id="bf16-recompute",
            ),
            pytest.param(
                2,
                MOCK + "--fp16 --initial-loss-scale 65536 --use-distributed-optimizer",
                id="fp16-dp2",
            ),
            pytest.param(
                1,
                SHAPE
                + NULL
                + "--mock-data --train-samples 48 --lr-warmup-samples 8 --eval-iters 1 "
                "--eval-interval 50 --lr-decay-style cosine --optimizer sgd",
                id="samples-sgd",
            ),
        ],
        5,
    ),
)
def test_gpt_on_mock_data(num_ranks: int, flags: str) -> None:
    same_as_upstream(num_ranks, flags)


def test_gpt_on_a_blend_of_indexed_datasets(tmp_path: Path) -> None:
    first, second = gpt_dataset(tmp_path / "a"), gpt_dataset(tmp_path / "b", seed=1)
    same_as_upstream(
        2,
        f"{GPT}--data-path 0.3 {first} 0.7 {second} --split 80,10,10 --data-cache-path "
        f"{tmp_path}/cache --eod-mask-loss --reset-position-ids --reset-attention-mask",
    )


def test_bert_in_two_pipeline_stages(tmp_path: Path) -> None:
    same_as_upstream(2, bert_flags(tmp_path) + PP2, script="pretrain_bert.py")


def differing_tensors(first: str, second: str) -> list[str]:
    """Compare all weights and optimizer states of two checkpoints, bit for bit."""
    import torch
    from megatron.core import dist_checkpointing
    from torch import distributed

    distributed.init_process_group("gloo")
    states = map(dist_checkpointing.load_plain_tensors, (first, second))
    left, right = (
        {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for state in states
    )
    assert len(left) > 20
    assert left.keys() == right.keys()
    return [key for key, tensor in left.items() if not torch.equal(tensor, right[key])]


def test_checkpoints_are_exchanged_with_upstream(tmp_path: Path) -> None:
    flags = MOCK.replace("--train-iters 3", "--train-iters 4") + DISTRIBUTED_OPTIMIZER
    resumed = []
    for embedded in (False, True):
        directory = tmp_path / str(embedded)
        save = f"--save {directory} --save-interval 2 --exit-interval 2"
        report(train(2, flags + save, embedded=embedded))
        resumed.append(report(train(2, f"{flags}--load {directory}", embedded=not embedded)))
    assert "iteration        3/" in resumed[0][0]
    assert resumed[0] == resumed[1]
    paths = (str(tmp_path / str(embedded) / "iter_0000002") for embedded in (False, True))
    assert run_ranks(1, differing_tensors, *paths) == [[]]
