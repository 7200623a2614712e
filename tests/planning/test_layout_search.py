"""The search against exhaustive search, its memory and time against published measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.incompatible import RULES
from megatron_ext.errors import ArgumentsError
from megatron_ext.planning import layout_forecast, layout_search
from megatron_ext.planning.forked import Caller, callers
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.layout_forecast import Layout, forecast, table_bound_s
from megatron_ext.planning.layout_search import search
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.question import ParallelSizes, Question

if TYPE_CHECKING:
    from megatron_ext.planning.model_sizes import ModelSizes

TINY = (
    "--num-layers 5 --hidden-size 256 --num-attention-heads 4 --padded-vocab-size 4096 --swiglu "
    "--max-position-embeddings 512"
)


def tiny(extra: str = "") -> ModelSizes:
    return sizes_of_flags(f"{TINY} {extra}".split(), "tiny")


def every_plan(job: Question) -> list[Layout]:
    """All sizes, schedules and cuts that fit."""
    found = []
    for sizes in layout_search._space(job):
        for own, schedule, chunks in layout_search._orders(job, sizes):
            layers, stages = job.model.num_layers, sizes.pp * chunks
            cuts = [None]
            if sizes.pp > 1:
                if schedule in ("bitpipe", "dualpipe"):
                    stages //= 2
                cuts = [
                    [b - a for a, b in zip((0, *ends), (*ends, layers), strict=True)]
                    for ends in combinations(range(1, layers), stages - 1)
                ]
            plans = (forecast(own, sizes, schedule, chunks, counts) for counts in cuts)
            found += [plan for plan in plans if plan is not None]
    return found


@settings(max_examples=12)
@given(
    st.sampled_from(
        [
            "",
            "--num-experts 4 --moe-router-topk 2",
            "--mtp-num-layers 1",
            "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0]*2+[1]*3",
        ]
    ),
    st.sampled_from([2, 4]),
    st.sampled_from([4, 8, 32]),
    st.sampled_from([0.03, 0.06, 0.12, 4.0]),
)
def test_the_bound_is_below_the_optimum_and_the_answer_close_to_it(
    extra: str, devices: int, batch: int, memory_gib: float
) -> None:
    device = dataclasses.replace(DEVICES["cpu"], memory_gib=memory_gib, reserve_gib=0.0)
    job = Question(
        model=tiny(extra), device=device, num_devices=devices, global_batch=batch, sequence=512,
        pair_rules=RULES["pairs"], fixed={"micro_batch": 1},
    )  # fmt: skip
    found, plans = search(job), every_plan(job)
    if not found.plans:
        return
    optimum = min(plan.step_s for plan in plans)
    assert found.bound_s <= optimum + 1e-9
    # The cut shortens the work of the busiest rank; an order may like another one better.
    assert optimum - 1e-9 <= found.plans[0].step_s <= 1.06 * optimum
    for plan in plans:
        assert plan.bound_s <= plan.step_s


@pytest.mark.parametrize("overlaps", [True, False])
def test_replicas_that_do_not_shard_the_optimizer_update_all_weights(
    overlaps: bool,
) -> None:
    sharded = Question(
        model=tiny(), device=DEVICES["cpu"], num_devices=4, global_batch=8, sequence=512,
        pair_rules=RULES["pairs"], overlaps=overlaps,
    )  # fmt: skip
    whole = dataclasses.replace(sharded, shards_optimizer=False)
    for replicas, is_longer in ((1, False), (2, True), (4, True)):
        sizes = ParallelSizes(
            tp=1, pp=4 // replicas, cp=1, ep=1, micro_batch=1, mode=frozenset(),
            num_microbatches=8 // replicas, replicas=replicas,
        )  # fmt: skip
        sharded_plan = forecast(sharded, sizes, "1f1b", 1)
        whole_plan = forecast(whole, sizes, "1f1b", 1)
        assert sharded_plan is not None
        assert whole_plan is not None
        assert (whole_plan.step_s > sharded_plan.step_s) == is_longer


@pytest.mark.parametrize(
    "extra", ["", "--moe-layer-freq [0]+[1]*8"], ids=["alike", "mixed"]
)
@pytest.mark.parametrize("slower", [280, 4000])
@pytest.mark.parametrize(
    ("memory_gib", "batch"),
    [(4.0, 8), (0.14, 8), (0.14, 32)],
    ids=["roomy", "tight", "long"],
)
def test_the_bound_is_below_every_plan_with_pairs(
    memory_gib: float, batch: int, slower: int, extra: str
) -> None:
    """With exchanges as long as the computation of a forward, and far longer."""
    cpu = DEVICES["cpu"]
    job = Question(
        model=tiny(f"--num-layers 9 --num-experts 4 --moe-router-topk 2 {extra}"),
        device=dataclasses.replace(
            cpu, all_to_all=cpu.all_to_all / slower, pair_overlap=1.0, memory_gib=memory_gib,
            reserve_gib=0.0,
        ),
        num_devices=8, global_batch=batch, sequence=512, pair_rules=RULES["pairs"],
        fixed={"tp": 1, "cp": 1, "ep": 2, "micro_batch": 1, "pairs": True,
               "recompute": frozenset()},
    )  # fmt: skip
    plans = every_plan(job)
    for plan in plans:
        assert plan.bound_s <= plan.step_s * (1 + 1e-9)
    possible = {
        (plan.sizes.pp, plan.schedule, plan.chunks) for plan in plans if plan.pairs
    }
    bounds = {
        (sizes.pp, schedule, chunks): table_bound_s(own, sizes, schedule, chunks)
        for sizes in layout_search._space(job)
        for own, schedule, chunks in layout_search._orders(job, sizes)
    }
    ruled_out = {each for each, bound in bounds.items() if bound == math.inf}
    if memory_gib == 4:
        assert {pp for pp, *_ in possible} == {1, 2, 4}
    else:  # some of what does not fit is ruled out for every cut
        assert possible
        assert ruled_out


def test_a_cut_fits_that_keeps_less_than_even_ranks_would() -> None:
    """1F1B keeps most on its first ranks, so a cut that gives them fewer layers needs less."""
    counts = [4, 4, 5, 6, 8, 9, 12, 16]
    roomy = dataclasses.replace(DEVICES["cpu"], memory_gib=100.0, reserve_gib=0.0)
    job = Question(
        model=tiny("--num-layers 64"), device=roomy, num_devices=8, global_batch=32, sequence=4096,
        pair_rules=RULES["pairs"],
        fixed={"tp": 1, "cp": 1, "pp": 8, "micro_batch": 1, "schedule": "1f1b",
               "recompute": frozenset(), "layout": counts},
    )  # fmt: skip
    [plan] = search(job).plans
    even = search(
        dataclasses.replace(job, fixed={**job.fixed, "layout": [8] * 8})
    ).plans[0]
    least = 1.001 * max(plan.memory_gib)
    assert 1.5 * least < max(even.memory_gib)
    tight = dataclasses.replace(
        job, device=dataclasses.replace(roomy, memory_gib=least)
    )
    assert [each.counts for each in search(tight).plans] == [tuple(counts)]


@pytest.mark.parametrize(
    ("name", "value"), [("schedule", "gpipe"), ("schedule", "zb-v"), ("layout", [2, 3])]
)
def test_no_layout_leaves_out_what_is_fixed(name: str, value: str | list[int]) -> None:
    job = Question(
        model=tiny(), device=DEVICES["cpu"], num_devices=4, global_batch=8, sequence=511,
        pair_rules=RULES["pairs"],
        fixed={"tp": 1, "micro_batch": 1, name: value},
    )  # fmt: skip
    plans = search(job).plans
    assert plans
    for plan in plans:
        kept = {"schedule": plan.schedule, "layout": list(plan.counts)}
        assert kept[name] == value


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved", 3), ("v-half", 2), ("bitpipe", 4)],
)
def test_a_long_step_is_as_long_as_its_whole_table(
    monkeypatch: pytest.MonkeyPatch, schedule: str, chunks: int
) -> None:
    """Ranks with uneven stages wait in every round: their work alone is up to a fifth less."""
    job = Question(
        model=tiny("--num-layers 15"), device=DEVICES["cpu"], num_devices=4, global_batch=64,
        sequence=512, pair_rules=RULES["pairs"],
        fixed={"tp": 1, "pp": 4, "micro_batch": 1, "recompute": frozenset()},
    )  # fmt: skip
    [sizes] = layout_search._space(job)
    short = forecast(job, sizes, schedule, chunks)
    monkeypatch.setattr(
        layout_forecast, "num_simulated", lambda sizes, _: sizes.num_microbatches
    )
    assert short is not None
    whole = forecast(job, sizes, schedule, chunks, short.counts)
    assert whole is not None
    assert short.step_s == pytest.approx(whole.step_s, rel=0.002)


def test_gpipe_keeps_every_micro_batch() -> None:
    job = Question(
        model=tiny(), device=DEVICES["cpu"], num_devices=2, global_batch=16, sequence=64,
        pair_rules=RULES["pairs"],
        fixed={"tp": 1, "pp": 2, "micro_batch": 1, "schedule": "gpipe", "recompute": frozenset()},
    )  # fmt: skip
    kept = [
        search(dataclasses.replace(job, global_batch=batch)).plans[0].kept_gib[0]
        for batch in (16, 64)
    ]
    assert kept[1] == pytest.approx(4 * kept[0])


def test_an_interrupt_while_devices_are_counted_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Question(
        model=tiny(), device=DEVICES["cpu"], num_devices=4, global_batch=8, sequence=512,
        pair_rules=RULES["pairs"],
    )  # fmt: skip
    assert layout_search.fits(job)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layout_search, "forecast", interrupt)
    with pytest.raises(KeyboardInterrupt):
        layout_search.fits(job)


def test_an_interrupted_search_gives_the_best_so_far() -> None:
    job = Question(
        model=tiny(), device=DEVICES["cpu"], num_devices=4, global_batch=8, sequence=512,
        pair_rules=RULES["pairs"],
    )  # fmt: skip

    def interrupt(found: layout_search.SearchResult, _left: int) -> None:
        if found.num_evaluated > 3 and found.plans:
            raise KeyboardInterrupt

    found, whole = search(job, progress=interrupt), search(job)
    assert not found.is_complete
    assert found.plans
    assert found.bound_s <= whole.plans[0].step_s <= found.plans[0].step_s


def test_several_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Question(
        model=tiny("--num-experts 4 --moe-router-topk 2"), device=DEVICES["cpu"], num_devices=8,
        global_batch=32, sequence=512, pair_rules=RULES["pairs"],
    )  # fmt: skip
    alone, counts = search(job), list[int]()

    def counted(
        function: Callable[..., object], count: int
    ) -> AbstractContextManager[list[Caller]]:
        counts.append(count)
        return callers(function, count)

    monkeypatch.setattr(layout_search, "callers", counted)
    together = search(job, processes=3)
    assert counts == [3]
    assert together.plans == alone.plans
    assert together.bound_s == alone.bound_s
    assert together.num_sizes == alone.num_sizes


def test_sizes_that_nothing_allows_are_an_error() -> None:
    job = Question(
        model=tiny(), device=DEVICES["cpu"], num_devices=8, global_batch=7, sequence=512,
        pair_rules=RULES["pairs"], fixed={"tp": 1, "pp": 1},
    )  # fmt: skip
    with pytest.raises(
        ArgumentsError, match="8 devices and --global-batch-size 7 allow no sizes"
    ):
        search(job)


def test_pairs_are_planned_with_what_they_hide_and_keep() -> None:
    fixed = {"tp": 1, "pp": 2, "ep": 2, "schedule": "1f1b", "recompute": frozenset()}
    job = Question(
        model=tiny("--num-experts 4 --moe-router-topk 2"), device=DEVICES["cpu"], num_devices=4,
        global_batch=16, sequence=512, pair_rules=RULES["pairs"], fixed={**fixed, "micro_batch": 1},
    )  # fmt: skip
    paired, alone = (
        search(
            dataclasses.replace(job, fixed={**job.fixed, "pairs": pairs}), keep=1
        ).plans[0]
        for pairs in (True, False)
    )
    [best] = search(job, keep=1).plans
    assert (best.pairs, best.step_s) == (True, paired.step_s)
    assert paired.step_s < alone.step_s
    share = job.device.pair_overlap
    # The first forward and the last backward have no partner, and the device hides a share.
    assert 0.5 * share < paired.hidden < share
    assert max(paired.memory_gib) > max(alone.memory_gib)
    overlap = "--overlap-moe-expert-parallel-comm"
    assert (overlap in paired.flags, overlap in alone.flags) == (True, False)
    # Preflight refuses pairs with these.
    moe = {**job.fixed, "pairs": True, "recompute": frozenset({"moe"})}
    assert not search(dataclasses.replace(job, fixed=moe)).plans
    # Experts that exchange nothing have no pairs, whatever is requested, as in training.
    [lone] = search(dataclasses.replace(job, fixed={**moe, "ep": 1}), keep=1).plans
    assert overlap not in lone.flags
