"""Losses, gradients and parameters of Megatron's own schedule, bit for bit, in special cases.

`tests/test_matrix.py` has every schedule with every parallelism, device and wire.
"""

from __future__ import annotations

import re
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedules.generators.catalog import generate
from megatron_ext.schedules.table import table_files
from tests.training import helpers
from tests.training.helpers import LLAMA, MLA, MOE, NO_DROPOUT, bert_flags

from .capture import GPT, PP2, PP4, Captured, run_here, train

EIGHT_LAYERS = "--num-layers 8 "
VPP2 = "--num-layers-per-virtual-pipeline-stage 1 "
UNCLIPPED = "--clip-grad 0 "
OVERLAP = "--overlap-grad-reduce "
SHARDED = "--use-distributed-optimizer --overlap-param-gather " + OVERLAP
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)
TWINS = ("bitpipe", "dualpipe")
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
    for step, (mine, stocks) in enumerate(
        zip(ours.gradients, theirs.gradients, strict=True)
    ):
        different = {
            name for name in mine.keys() | stocks.keys() if mine[name] != stocks[name]
        }
        assert not different, f"gradients of step {step}"
    different = {
        n for n, digest in theirs.parameters.items() if ours.parameters[n] != digest
    }
    assert not different
    assert len(theirs.parameters) == len(ours.parameters) > 10


def check(num_ranks: int, schedule: str, flags: str, *, theirs: str, ours: str) -> None:
    """Compare a schedule with Megatron's own under the same other flags."""
    found = train(num_ranks, f"{flags}{ours}--pipeline-schedule {schedule} ")
    assert found.tables[0].split()[0] == schedule
    assert_equal(found, stock(num_ranks, flags + theirs))


@pytest.mark.short_s(4)
def test_equal_lengths_keep_their_order() -> None:
    check(2, "1f1b", GPT, theirs=PP2, ours=PP2 + "--pipeline-balance order ")


def test_equal_lengths_keep_their_replica() -> None:
    check(4, "1f1b", GPT, theirs=PP2, ours=PP2 + "--pipeline-balance pack ")


@pytest.mark.short_s(4)
@pytest.mark.parametrize(
    ("schedule", "m"), [("1f1b", 1), ("zb-h1", 3), ("zb-v", 1), ("zb-v", 5)]
)
def test_few_and_odd_micro_batches(schedule: str, m: int) -> None:
    flags = f"{GPT}{UNCLIPPED}--global-batch-size {2 * m} "
    check(2, schedule, flags, theirs=PP2, ours=PP2)


@pytest.mark.slow
def test_bitpipe_on_eight_ranks() -> None:
    flags = GPT + UNCLIPPED + "--num-layers 16 --global-batch-size 32 " + SHARDED
    check(8, "bitpipe", flags, theirs=PP4, ours="--pipeline-model-parallel-size 8 ")


PAIRS = "--overlap-moe-expert-parallel-comm "
LATENT = f"{EIGHT_LAYERS}{MLA}{MOE}--moe-shared-expert-intermediate-size 32 "


EXPERTS = LLAMA + MOE + "--bf16 "
_LATENT = LATENT + "--bf16 "
_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
_ALLGATHER = "--moe-token-dispatcher-type allgather "
_SELECTED = "--recompute-granularity selective --recompute-modules "
PAIRED = {
    "1f1b": ("1f1b", EXPERTS),
    "zb-v": ("zb-v", EXPERTS),
    **{name: (name, EXPERTS) for name in ("zb-h1", "v-half", "dualpipe-v", "dualpipe")},
    "bitpipe": ("bitpipe", EIGHT_LAYERS + EXPERTS + "--bitpipe-routing local "),
    "bitpipe, paper": (
        "bitpipe",
        EIGHT_LAYERS + EXPERTS + "--bitpipe-order paper --bitpipe-routing local ",
    ),
    "csv": ("csv", EXPERTS),
    "interleaved": ("interleaved", EXPERTS + VPP2),
    "latent": ("dualpipe-v", _LATENT),
    "two layers of multi-token prediction": ("zb-v", _LATENT + "--mtp-num-layers 2 "),
    "three, whole backwards": ("1f1b", _LATENT + "--mtp-num-layers 3 "),
    # An expert's own input, which W reads, is then what came in: 0.16 frees it.
    "one expert on each rank": ("zb-v", EXPERTS + "--num-experts 2 "),
    "one expert, whole backwards": ("1f1b", EXPERTS + "--num-experts 2 "),
    "gathered": ("zb-v", EXPERTS + _ALLGATHER),
    "gathered with tensor parallel": (
        "1f1b",
        EXPERTS + _ALLGATHER + TP2 + "--expert-tensor-parallel-size 1 ",
    ),
    # Four replicas sum in an order of the placement, so it has to be Megatron's.
    "experts on four ranks": ("zb-h1", EXPERTS + "--expert-model-parallel-size 4 "),
    "tensor parallel": ("zb-v", EXPERTS + TP2 + "--expert-tensor-parallel-size 1 "),
    "single precision": ("zb-v", LLAMA + MOE),
    "sharded": ("zb-v", EXPERTS + SHARDED),
    "tied": ("zb-v", EXPERTS.replace("--untie-embeddings-and-output-weights ", "")),
    "expert bias": (
        "zb-v",
        (
            f"{EXPERTS}--moe-aux-loss-coeff 0 --moe-router-enable-expert-bias "
            "--moe-router-score-function sigmoid "
        ),
    ),
    "dense layers": (
        "zb-v",
        f"{EXPERTS}--moe-layer-freq [0,1,1,1] {_SELECTED}core_attn mlp layernorm ",
    ),
    "all recomputed": ("zb-v", EXPERTS + RECOMPUTE),
    "all recomputed, where W comes later": ("zb-h1", EXPERTS + RECOMPUTE),
    "all recomputed, latent": ("dualpipe-v", _LATENT + RECOMPUTE),
    "first layers recomputed": (
        "1f1b",
        EXPERTS + RECOMPUTE.replace("uniform", "block"),
    ),
    "recomputed": (
        "zb-v",
        f"{_LATENT}{_SELECTED}core_attn mla_up_proj layernorm shared_experts ",
    ),
}
"""Pairs under every schedule, then with what their plans cut or free in another way."""
_QUICK = (
    "1f1b",
    "zb-v",
    "two layers of multi-token prediction",
    "three, whole backwards",
)


@pytest.mark.short_s(8)
@pytest.mark.parametrize(
    "name",
    [
        name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in PAIRED
    ],
)
def test_pairs_hide_the_communication_of_experts(name: str, tmp_path: Path) -> None:
    ranks, ours, theirs = paired(name, tmp_path)
    found = train(ranks, ours)
    assert found.pairs > 0
    assert_equal(found, stock(ranks, theirs))


def paired(name: str, tmp_path: Path) -> tuple[int, str, str]:
    """Return ranks, flags in pairs, and those of Megatron's own schedule with the same bits."""
    schedule, model = PAIRED[name]
    ranks = 8 if name == "experts on four ranks" else 4
    flags = f"{GPT}{UNCLIPPED}--global-batch-size 16 {EP2}{model}"
    # What is recomputed is the same; 0.18 recomputes no layer of multi-token prediction.
    theirs = re.sub("--bitpipe-[a-z]+ [a-z]+ ", "", flags).replace(RECOMPUTE, "") + PP2
    if schedule == "csv":
        file = tmp_path / "zb-h1.csv"
        file.write_text(table_files.csv_text(generate("zb-h1", 2, 4, pairs=True)))
        schedule = f"csv:{file}"
    ours = (
        PP4 if schedule in TWINS else PP2
    ) + f"--pipeline-schedule {schedule} {PAIRS}"
    return ranks, flags + ours, theirs


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_full_backwards_overlap_their_reduction(schedule: str) -> None:
    """Several buckets, reduced during the last backward by DDP's hooks."""
    flags = GPT + SHARDED + "--ddp-num-buckets 4 "
    more = PP2 + (VPP2 if schedule == "interleaved" else "")
    check(4, schedule, flags, theirs=more, ours=more)


INSTANCES = "--num-distributed-optimizer-instances 2 "


@pytest.mark.parametrize("schedule", ["--use-dpp ", "roles"])
def test_several_optimizer_instances_reduce_once(schedule: str) -> None:
    """The log has the norm of the gradients. Megatron's own schedule reduces later stages twice."""
    num_ranks, flags = 4, f"{GPT}{PP2}{SHARDED}--calculate-per-token-loss "
    if schedule == "roles":
        num_ranks, schedule = 8, "--forward-backward-disaggregating "
    one, two = (
        helpers.report(helpers.train(num_ranks, f"{flags}{schedule}{instances}"))
        for instances in ("", INSTANCES)
    )
    assert one == two


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "dualpipe-v", "bitpipe"])
def test_several_optimizer_instances_sum_as_one_does(schedule: str) -> None:
    """Of two replicas, with several buckets for each chunk; norms add up other shards."""
    flags = (
        f"{GPT}{UNCLIPPED}{EIGHT_LAYERS}{SHARDED}--ddp-num-buckets 4 --train-iters 5 "
    )
    ours = (PP4 if schedule in TWINS else PP2) + INSTANCES
    check(4, schedule, flags, theirs=PP2, ours=ours)


def _without_functions(model: str, argv: list[str], mean_delay_s: float) -> Captured:
    """Train as a program that gives Megatron no functions for reductions."""
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.core.utils import get_model_config
    from megatron.training import training

    step = training.train_step

    @wraps(step)
    def stepping(
        forward_step: Any, data: Any, chunks: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        config = get_model_config(chunks[0])
        config.no_sync_func = config.grad_sync_func = None
        return step(forward_step, data, chunks, *args, **kwargs)

    training.train_step = stepping  # this process is a rank and ends
    return run_here(model, argv, mean_delay_s)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_programs_need_no_functions_for_reductions(schedule: str) -> None:
    """Megatron's own schedules need none either: hooks then count all backwards of a step."""
    flags = GPT + UNCLIPPED + PP2 + OVERLAP
    ours = f"{flags}--pipeline-schedule {schedule} "
    assert_equal(train(4, ours, run=_without_functions), stock(4, flags))


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
    different = {
        name for name in mine.keys() | stocks.keys() if mine[name] != stocks[name]
    }
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
