"""Every schedule gives the losses, gradients and parameters of Megatron's own, bit for bit.

Gradients are summed in the order of the micro-batches in all of them. What differs between
placements is the norm that gradients are clipped by: it is added up rank by rank. So nothing is
clipped where stages live elsewhere than in Megatron's own pipeline; one test measures what clipping
changes then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import LLAMA, MOE, NO_DROPOUT, bert_flags

from .capture import GPT, PP2, PP4, Captured, train

EIGHT_LAYERS = "--num-layers 8 "
VPP2 = "--num-layers-per-virtual-pipeline-stage 1 "
UNCLIPPED = "--clip-grad 0 "
OVERLAP = "--overlap-grad-reduce "
SHARDED = "--use-distributed-optimizer --overlap-param-gather " + OVERLAP
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
TWINS = ("bitpipe", "dualpipe")
EVERY = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "v-half", "dualpipe-v", *TWINS)
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "


@cache
def stock(num_ranks: int, flags: str, model: str = "gpt") -> Captured:
    """Return what Megatron's own schedule computes."""
    captured = train(num_ranks, flags, model=model)
    assert captured.tables == []
    return captured


def assert_equal(ours: Captured, theirs: Captured) -> None:
    """Compare every loss, gradient and parameter, and name what differs."""
    assert ours.losses == theirs.losses
    for step, (mine, stocks) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        different = {name for name in mine.keys() | stocks.keys() if mine[name] != stocks[name]}
        assert not different, f"gradients of step {step}"
    different = {n for n, digest in theirs.parameters.items() if ours.parameters[n] != digest}
    assert not different
    assert len(theirs.parameters) == len(ours.parameters) > 10


def check(num_ranks: int, schedule: str, flags: str, *, theirs: str, ours: str) -> None:
    """Compare a schedule with Megatron's own under the same other flags."""
    found = train(num_ranks, f"{flags}{ours}--pipeline-schedule {schedule} ")
    assert found.tables[0].split()[0] == schedule
    assert_equal(found, stock(num_ranks, flags + theirs))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "dualpipe-v"])
def test_two_ranks(schedule: str) -> None:
    check(2, schedule, GPT + UNCLIPPED, theirs=PP2, ours=PP2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_four_ranks(schedule: str) -> None:
    flags = GPT + UNCLIPPED + EIGHT_LAYERS + "--global-batch-size 16 "
    check(4, schedule, flags, theirs=PP4, ours=PP4)


def test_equal_lengths_keep_their_order() -> None:
    check(2, "1f1b", GPT, theirs=PP2, ours=PP2 + "--pipeline-balance order ")


def test_equal_lengths_keep_their_replica() -> None:
    check(4, "1f1b", GPT, theirs=PP2, ours=PP2 + "--pipeline-balance pack ")


def test_interleaved() -> None:
    check(4, "interleaved", GPT + EIGHT_LAYERS, theirs=PP4 + VPP2, ours=PP4 + VPP2)


@pytest.mark.parametrize(("schedule", "m"), [("1f1b", 1), ("zb-h1", 3), ("zb-v", 1), ("zb-v", 5)])
def test_few_and_odd_micro_batches(schedule: str, m: int) -> None:
    flags = f"{GPT}{UNCLIPPED}--global-batch-size {2 * m} "
    check(2, schedule, flags, theirs=PP2, ours=PP2)


@pytest.mark.parametrize("flags", ["", "--bitpipe-routing local ", "--bitpipe-order paper "])
def test_bitpipe_is_half_the_pipeline_twice(flags: str) -> None:
    ours = f"--pipeline-model-parallel-size 4 {flags}"
    check(4, "bitpipe", GPT + UNCLIPPED + EIGHT_LAYERS, theirs=PP2, ours=ours)


@pytest.mark.slow
def test_bitpipe_on_eight_ranks() -> None:
    flags = GPT + UNCLIPPED + "--num-layers 16 --global-batch-size 32 " + SHARDED
    check(8, "bitpipe", flags, theirs=PP4, ours="--pipeline-model-parallel-size 8 ")


def test_dualpipe_is_half_the_pipeline_twice() -> None:
    flags = GPT + UNCLIPPED + "--global-batch-size 16 "
    check(4, "dualpipe", flags, theirs=PP2, ours="--pipeline-model-parallel-size 4 ")


PARALLELISM = {
    "tp2-sequence-parallel": (2, TP2, "torch"),
    "dp2-overlap-shm": (2, OVERLAP, "shm"),
    "dp2-distributed-optimizer-overlaps": (2, SHARDED, "torch"),
    "recompute-tcp": (1, RECOMPUTE, "tcp"),
    "llama-untied-shm": (1, LLAMA, "shm"),
    "moe": (1, LLAMA + MOE, "torch"),
}
"""Ranks for each stage, flags and wire."""


def every_schedule_with_every_parallelism() -> Iterator[Any]:
    """Yield all pairs; in the quick ones each schedule occurs, and each parallelism."""
    for column, (name, case) in enumerate(PARALLELISM.items()):
        for row, schedule in enumerate(EVERY):
            marks = [] if (row + column) % 6 == 0 else [pytest.mark.slow]
            yield pytest.param(schedule, *case, id=f"{name}-{schedule}", marks=marks)


@pytest.mark.parametrize(
    ("schedule", "ranks_per_stage", "flags", "transport"),
    [*every_schedule_with_every_parallelism()],
)
def test_with_other_parallelism(
    schedule: str, ranks_per_stage: int, flags: str, transport: str
) -> None:
    """Twins are two data-parallel replicas as they are."""
    twins = schedule in TWINS
    num_ranks = 4 * (2 if TP2 in flags else 1) if twins else 2 * ranks_per_stage
    flags = f"{GPT}{UNCLIPPED}{EIGHT_LAYERS}--global-batch-size 16 {flags}"
    ours = (PP4 if twins else PP2) + f"--pipeline-transport {transport} "
    check(num_ranks, schedule, flags, theirs=PP2, ours=ours)


@pytest.mark.parametrize(
    ("schedule", "transport"),
    [("1f1b", "shm"), ("interleaved", "auto"), ("zb-v", "tcp"), ("bitpipe", "shm")],
)
def test_training_and_evaluation_over_the_native_core(schedule: str, transport: str) -> None:
    flags = GPT.replace("--eval-iters 0", "--eval-iters 1") + UNCLIPPED + EIGHT_LAYERS
    ours = (PP4 if schedule in TWINS else PP2) + f"--pipeline-transport {transport} "
    found = train(4, f"{flags}{ours}--pipeline-schedule {schedule} ")
    assert found.transports == ["NativeTransport"]
    assert found.tables[1:] == ["forward-only"]
    assert_equal(found, stock(4, flags + PP2))


def test_expert_parallelism() -> None:
    flags = GPT + UNCLIPPED + LLAMA + MOE + EP2 + SHARDED
    check(4, "zb-v", flags, theirs=PP2, ours=PP2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_full_backwards_overlap_their_reduction(schedule: str) -> None:
    """Several buckets, reduced during the last backward by DDP's hooks."""
    flags = GPT + SHARDED + "--ddp-num-buckets 4 "
    more = PP2 + (VPP2 if schedule == "interleaved" else "")
    check(4, schedule, flags, theirs=more, ours=more)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "bitpipe"])
@pytest.mark.parametrize("model", ["", LLAMA + MOE + EP2], ids=["gpt", "experts"])
def test_weights_overlap_their_reduction(schedule: str, model: str) -> None:
    """Several buckets, reduced during the last W."""
    flags = f"{GPT}{UNCLIPPED}{EIGHT_LAYERS}--global-batch-size 16 {model}{SHARDED}"
    flags += "--ddp-num-buckets 8 "
    ours = PP4 + "--bitpipe-routing local " if schedule in TWINS else PP2
    check(4, schedule, flags, theirs=PP2, ours=ours)


def test_what_tokens_that_cross_to_the_twin_change() -> None:
    """Experts on both twins sum over tokens of both, in inner stages those of the twin first."""
    flags = f"{GPT}{UNCLIPPED}{EIGHT_LAYERS}--global-batch-size 16 {LLAMA}{MOE}{EP2}"
    ours = train(4, f"{flags}{PP4}--pipeline-schedule bitpipe ")
    theirs = stock(4, flags + PP2)
    mine, stocks = ours.gradients[0], theirs.gradients[0]
    different = {name for name in mine.keys() | stocks.keys() if mine[name] != stocks[name]}
    inner = tuple(f"decoder.layers.{n}.mlp.experts." for n in (2, 3, 4, 5))
    assert different
    assert all(name.startswith(inner) for name in different)
    for mine, stocks in zip(ours.losses, theirs.losses, strict=True):
        assert mine["lm loss"] == pytest.approx(stocks["lm loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "ours"),
    [
        pytest.param(2, PP2 + "--pipeline-schedule zb-v ", id="zb-v"),
        # Its stages in the middle get the twin's activations, and need the twin's padding.
        pytest.param(4, PP4 + "--pipeline-schedule bitpipe ", id="bitpipe"),
    ],
)
def test_bert(tmp_path: Path, num_ranks: int, ours: str) -> None:
    flags = f"{bert_flags(tmp_path)}--split 100,0,0 {NO_DROPOUT}{UNCLIPPED}"
    flags += "--num-layers 8 --train-iters 2 --eval-iters 0 "
    found = train(num_ranks, flags + ours, model="bert")
    assert found.tables[0].split()[0] in ours
    assert_equal(found, train(num_ranks, flags + PP2, model="bert"))


def test_what_clipping_changes() -> None:
    """The norm of the same gradients in another order: the last digit of single precision."""
    ours = train(2, GPT + PP2 + "--pipeline-schedule zb-v ")
    theirs = stock(2, GPT + PP2)
    assert ours.gradients[0] == theirs.gradients[0]
    for mine, stocks in zip(ours.losses, theirs.losses, strict=True):
        assert mine["lm loss"] == pytest.approx(stocks["lm loss"], rel=1e-6)
