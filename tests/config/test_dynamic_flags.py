"""The flags of dynamic schedules: what they choose, what the log says, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_ext.config.entrances import order_in_words, running, warning
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.schedules import Costs, generate
from megatron_ext.schedules.search.patience import gains
from tests.commands import run_package
from tests.config.test_schedule_flags import MODEL, PP4, outcomes
from tests.pipelines import make_pipeline
from tests.ranks import require_training, run_ranks

VPP2 = "--num-virtual-stages-per-pipeline-rank 2 "
CHOSEN = {
    PP4 + "--use-dpp": (
        "1f1b on 4 ranks, 8 micro-batches: dynamic order by hint, at most 5 activations (+1); ",
        "; messages over the fastest transport between any two ranks (auto)",
    ),
    PP4 + VPP2 + "--use-dpp --dpp-extra-activations 0 --pipeline-transport shm": (
        "interleaved chunks=2 on 4 ranks", "at most 5.5 activations (+0); ", "; messages over shm",
    ),
    PP4 + "--use-dpp --dpp-policy breadth-first --pipeline-schedule zb-v": (
        "zb-v chunks=2 on 4 ranks",
        "dynamic order by breadth-first, no bound on activations, up to 8; ",
    ),
    PP4 + "--use-dpp --enable-bitpipe-schedule --bitpipe-order paper": (
        "bitpipe order=paper on 4 ranks (two mirrored pipelines of 2)",
        "dynamic order by hint, at most 6 activations (+1); ",
    ),
}  # fmt: skip
REFUSED = {
    "policy alone": (PP4 + "--dpp-policy hint", 4, ["--dpp-policy requires --use-dpp; add --use"]),
    "extra alone": (PP4 + "--dpp-extra-activations 0", 4, ["add --use-dpp, or remove --dpp-extra"]),
    "extra": (PP4 + "--use-dpp --dpp-extra-activations -1", 4, ["--dpp-extra-activations 0"]),
    "extra without a bound": (
        PP4 + "--use-dpp --dpp-policy depth-first --dpp-extra-activations 2", 4,
        ["--dpp-policy depth-first has no memory bound"],
    ),
    "transport": (
        PP4 + "--use-dpp --pipeline-transport torch", 4,
        ["--use-dpp needs to know which messages have arrived, which torch.distributed"],
    ),
    "one stage": ("--use-dpp", 1, ["--use-dpp needs a pipeline", "or remove --use-dpp"]),
    "loss over replicas in a layer": (
        PP4 + "--use-dpp --num-experts 4 --moe-router-load-balancing-type global_aux_loss", 8,
        ["--use-dpp cannot run with --moe-router-load-balancing-type global_aux_loss",
         "use --moe-router-load-balancing-type aux_loss or seq_aux_loss"],
    ),
    "twins gather": (
        PP4 + "--use-dpp --enable-bitpipe-schedule --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather", 4,
        ["--use-dpp cannot run with --overlap-param-gather", "use --bitpipe-routing local"],
    ),
}  # fmt: skip


def test_the_log_says_that_its_figures_are_for_whole_micro_batches() -> None:
    line = running(make_pipeline("1f1b", 2, 4, slice_tokens=4096))
    assert line.endswith(
        "; bubble and peak are for whole micro-batches, and each step cuts micro-batches of "
        "more than 4096 tokens into slices"
    )


def _outcomes(cases: list[tuple[str, int]]) -> list[dict[str, Any] | str]:
    require_training()
    [found] = run_ranks(1, outcomes, [("gpt", MODEL + f, world) for f, world in cases])
    return found


def test_the_log_names_policy_bound_and_transport() -> None:
    for found, words in zip(
        _outcomes([(f, 4) for f in CHOSEN]), CHOSEN.values(), strict=True
    ):
        assert isinstance(found, dict), found
        [line] = [
            line for line in found["log"] if line.startswith("pipeline schedule: ")
        ]
        for word in words:
            assert word in line


def test_what_cannot_run_is_refused_with_what_can() -> None:
    results = _outcomes([(flags, world) for flags, world, _ in REFUSED.values()])
    for (name, (_, _, words)), found in zip(REFUSED.items(), results, strict=True):
        assert isinstance(found, str), name
        for word in words:
            assert word in found, name


def test_backwards_that_cannot_be_split_stay_whole() -> None:
    pipeline = make_pipeline(
        "interleaved", 4, 8, 2, dynamic=DynamicOrder(), splits=False
    )
    assert not pipeline.schedule(8).splits_backward
    assert order_in_words(pipeline).endswith(", whole backward passes")
    assert (
        make_pipeline("interleaved", 4, 8, 2, dynamic=DynamicOrder())
        .schedule(8)
        .splits_backward
    )


def test_the_user_is_told_where_the_order_of_the_table_is_as_fast() -> None:
    assert (
        warning(make_pipeline("interleaved", 4, 16, 2, dynamic=DynamicOrder())) is None
    )
    told = warning(
        make_pipeline("zb-v", 8, 32, dynamic=DynamicOrder(extra_activations=0))
    )
    assert told is not None
    assert "the static order of zb-v is as fast as --use-dpp (simulated)" in told
    assert "remove --use-dpp unless links or micro-batches vary" in told
    told = warning(
        make_pipeline("zb-v", 8, 32, dynamic=DynamicOrder(policy="breadth-first"))
    )
    assert told is not None
    assert re.search(
        r"the static order of zb-v takes [\d.]+ % less time than --use-dpp", told
    )


def test_plan_recommends_the_order_that_is_faster() -> None:
    as_fast = gains(generate("zb-v", 8, 32))
    assert as_fast.quiet == pytest.approx(1)
    assert as_fast.late > 1.05
    assert as_fast.advice.startswith("keep the table's order")
    assert gains(generate("interleaved", 4, 16), Costs()).advice == "--use-dpp"
    slower = gains(generate("zb-h1", 4, 16))
    printed = run_package(
        "plan", "--pp", "4", "--microbatches", "16", "--use-dpp"
    ).stdout
    assert (
        f"{slower.quiet:.3f} if no message is late, {slower.late:.3f} if messages"
        in printed
    )
    assert "keep the table's order" in printed
