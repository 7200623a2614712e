"""Command lines that hang together are completed; the others are refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.ranks import run_ranks

from .helpers import LLAMA, MOCK, MOE


def outcomes(cases: list[tuple[str, int]]) -> list[str | dict[str, Any]]:
    """Parse each (flags, world size); give the complete arguments or the error."""
    from megatron_ext.errors import ArgumentsError
    from megatron_ext.training.model import transformer_config
    from megatron_ext.training.trainer_arguments import parse

    found: list[str | dict[str, Any]] = []
    for flags, world_size in cases:
        try:
            args = parse("gpt", flags.split(), {"WORLD_SIZE": str(world_size)})
            transformer_config(args)
        except ArgumentsError as error:  # noqa: PERF203
            found.append(str(error))
        else:
            plain = (bool, int, str)
            found.append({k: v for k, v in vars(args).items() if v is None or type(v) in plain})
    return found


REFUSED = {
    "unsupported": (MOCK + "--sft", 1, ["--sft: not among", "megatron-ext upstream fetch"]),
    "dropped": (MOCK + "--rampup-batch-size 2 2 8", 1, ["--rampup-batch-size: not among"]),
    "misspelt": (MOCK + "--tensor-model-paralel-size 2", 2, ["--tensor-model-parallel-size?"]),
    "stray": (MOCK + "and more", 1, ["unexpected words: and more"]),
    "type": (MOCK + "--hidden-size nine", 1, ["--hidden-size", "nine"]),
    "choice": (MOCK + "--ckpt-format torch", 1, ["--ckpt-format", "torch_dist"]),
    "missing": (MOCK.replace("--num-layers 4", ""), 1, ["--num-layers is missing"]),
    "few processes": (
        MOCK + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 3,
        ["3 process(es)", "tensor 2 x pipeline 2 = 4", "--nproc-per-node 4"],
    ),
    "world": (
        MOCK + "--tensor-model-parallel-size 2", 3, ["3 process(es)", "tensor 2 x pipeline 1 = 2"]
    ),
    "layers": (
        MOCK + "--pipeline-model-parallel-size 3", 3,
        ["layers = 4", "--pipeline-model-parallel-size = 3"],
    ),
    "chunks": (
        MOCK + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2,
        ["pipeline rank = 2", "--num-layers-per-virtual-pipeline-stage = 3"],
    ),
    "splits": (
        MOCK + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttt|L", 2,
        ["layout = 3", "--pipeline-model-parallel-size = 2"],
    ),
    "two splits": (
        MOCK + "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
        1, ["exclude each other"],
    ),
    "vpp without pp": (MOCK + "--num-virtual-stages-per-pipeline-rank 2", 1, [">= 2", "it is 1"]),
    "batch": (MOCK.replace("batch-size 8", "batch-size 7"), 1, ["--global-batch-size = 7", "= 2"]),
    "precision": (MOCK + "--fp16 --bf16", 1, ["--fp16 and --bf16 exclude each other"]),
    "heads": (MOCK + "--tensor-model-parallel-size 8", 8, ["core refuses", "heads (4)", "(8)"]),
    "positions": (MOCK + "--max-position-embeddings 8", 1, ["8 is below --seq-length 16"]),
    "gather": (MOCK + "--overlap-param-gather", 1, ["--use-distributed-optimizer"]),
    "experts": (
        MOCK + MOE + "--no-bias-gelu-fusion --expert-model-parallel-size 3", 3,
        ["--num-experts = 4", "= 3"],
    ),
    "no experts": (MOCK + "--expert-model-parallel-size 2", 2, ["needs --num-experts"]),
    "top k": (MOCK + "--num-experts 4 --moe-router-topk 5", 1, ["--moe-router-topk 5", "4"]),
    "samples": (MOCK + "--train-samples 8", 1, ["--train-iters and --train-samples exclude"]),
    "warm-up": (MOCK + "--lr-warmup-samples 8", 1, ["--lr-warmup-samples", "--lr-warmup-iters"]),
    "no data": (MOCK.replace("--mock-data", ""), 1, ["no data", "--mock-data", "--data-path"]),
    "two sources": (MOCK + "--data-path x", 1, ["--mock-data and --data-path exclude"]),
    "save": (MOCK + "--save /tmp/x", 1, ["--save needs --save-interval"]),
    "no layers": (MOCK + "--num-layers 0", 1, ["--num-layers 0 is below 1"]),
    "no ranks": (MOCK + "--tensor-model-parallel-size 0", 1, ["parallel-size 0 is below 1"]),
    "no interval": (MOCK + "--log-interval 0", 1, ["--log-interval 0 is below 1"]),
    "negative": (MOCK + "--eval-iters -1", 1, ["--eval-iters -1 is below 0"]),
    "layout": (
        MOCK + "--pipeline-model-parallel-layout Ett|ttX", 1, ["-layout Ett|ttX: ", "character: X"]
    ),
    "core": (MOCK + "--recompute-granularity full", 1, ["core refuses", "recompute_method"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals() -> dict[str, Any]:
    cases = [(flags, world_size) for flags, world_size, _ in REFUSED.values()]
    return dict(zip(REFUSED, run_ranks(1, outcomes, cases)[0], strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_value_and_remedy(refusals: Mapping[str, Any], name: str) -> None:
    message = refusals[name]
    assert isinstance(message, str), "was accepted"
    for part in REFUSED[name][2]:
        assert part in message


def test_what_is_derived() -> None:
    cases = [
        (MOCK + LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel --bf16", 4),
        (MOCK + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL", 2),
        (MOCK.replace("--global-batch-size 8", "") + "--sequence-parallel --fp16", 3),
    ]
    tensor, layout, replicas = run_ranks(1, outcomes, cases)[0]
    assert (tensor["data_parallel_size"], tensor["ffn_hidden_size"]) == (2, 64)
    assert tensor["accumulate_allreduce_grads_in_fp32"]
    assert not tensor["overlap_p2p_comm"]
    assert layout["virtual_pipeline_model_parallel_size"] == 2
    assert layout["overlap_p2p_comm"]
    assert (replicas["global_batch_size"], replicas["sequence_parallel"]) == (6, False)
    assert not replicas["check_for_nan_in_loss_and_grad"]
    assert (replicas["kv_channels"], replicas["ffn_hidden_size"]) == (8, 128)
