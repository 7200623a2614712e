"""Scenarios of the benchmark of schedules disturb what they say, alike for all systems."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import mean, median

import pytest

from benchmarks import dynamic_order
from benchmarks.harness import ranks, scenarios
from benchmarks.harness.ops import SCENARIOS, NoisyTimes, Sizes
from benchmarks.harness.scenarios import noisy, shortest
from benchmarks.harness.systems import PEERS, ordered
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.table.placement import loop
from megatron_ext.schedules.table.transforms import split_backwards

PP, MICROBATCHES, FORWARD_S = 2, 4, 4e-3
SIZES = Sizes(PP, MICROBATCHES, FORWARD_S, warmup=1, steps=1, timeout_s=60)
EXACT_S = 5e-4
"""Sleeps may end so much early."""


def times(name: str, step: int = 0) -> NoisyTimes:
    return NoisyTimes(1.0, 0.5, SCENARIOS[name], loop(PP, 2).rank_of, 0, step)


def test_draws_have_mean_one_and_belong_to_what_they_are_for() -> None:
    drawn = [
        times("jitter-0.6", step).seconds("F", 1, m)
        for step in range(40)
        for m in range(40)
    ]
    assert mean(drawn) == pytest.approx(0.5, rel=0.1)
    assert times("jitter-0.6").seconds("F", 1, 0) == drawn[0]
    one = times("microbatch-0.5")
    assert one.seconds("F", 0, 1) == one.seconds("W", 3, 1) != one.seconds("F", 0, 2)
    assert one.seconds("B", 0, 1) == 2 * one.seconds("I", 0, 1)


def test_slow_places_are_where_they_are_said_to_be() -> None:
    assert times("slow-rank").seconds("F", 1, 0) == 1.3 * times("slow-rank").seconds(
        "F", 2, 0
    )
    assert times("uneven").seconds("F", 3, 0) == 1.5 * times("uneven").seconds(
        "F", 1, 0
    )
    assert (
        times("slow-hop").latency_s("F", 1, 0)
        == times("slow-hop").latency_s("B", 0, 0)
        == 1.0
    )
    assert times("quiet").latency_s("F", 1, 0) == 0.0
    local = NoisyTimes(1.0, 1.0, SCENARIOS["link-0.5"], (0, 0), 0, 0)
    assert local.latency_s("F", 1, 0) == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "interleaved chunks=2, hint +1",
        "megatron-core interleaved, overlapped P2P",
        "torch Interleaved1F1B",
    ],
)
def test_nobody_computes_with_a_message_that_is_not_there_yet(name: str) -> None:
    system = PEERS.get(name) or ordered(name)
    times = noisy(system, SIZES, "slow-hop")
    records = ranks.run(ranks.measure, system, SIZES, times, True, repeats=2)
    ops = [op for [step] in records for op in step.ops]
    made = {  # a busy machine may let a process wait before it notes the end
        (op.kind.replace("I", "B"), op.stage, op.microbatch): op.begin_s
        + times[0].seconds("F" if op.kind == "F" else "I", op.stage, op.microbatch)
        for op in ops
    }
    checked = 0
    for op in ops:
        kind, step = ("F", 1) if op.kind == "F" else ("B", -1)
        made_s = made.get((kind, op.stage - step, op.microbatch))
        if op.kind == "W" or made_s is None:
            continue
        latency_s = times[0].latency_s(kind, op.stage, op.microbatch)
        takes_s = times[0].seconds(op.kind, op.stage, op.microbatch)
        assert op.end_s - takes_s >= made_s + latency_s - EXACT_S
        checked += 1
    assert checked == 6 * MICROBATCHES


def test_no_order_is_shorter_than_the_bound_and_some_reach_it() -> None:
    table = split_backwards(generate("interleaved", PP, MICROBATCHES))
    for seed in range(10):
        costs = Costs(latency=0.3, jitter=0.5, link_jitter=1.0, seed=seed)
        bound = shortest(table, costs)
        assert simulate(table, costs).makespan >= bound > 2.0 * MICROBATCHES
    one = Costs(latency=0.2, jitter=0.3)
    alone = split_backwards(generate("1f1b", PP, 1))
    assert shortest(alone, one) == pytest.approx(simulate(alone, one).makespan)


def test_a_comparison_relates_systems_to_its_reference_and_to_the_bound() -> None:
    names = ("interleaved chunks=2, static, split", "interleaved chunks=2, hint +1")
    compared = dynamic_order.Comparison("a", names[0], names[1:], ["quiet", "link-0.5"])
    part = dynamic_order.Part(PP, MICROBATCHES, 4.0, [compared])
    found = dynamic_order.run(part, SIZES, None)
    assert len(found.compared.as_json()["systems"]) == 4
    *_, late, peaks, _ = dynamic_order.text_of(found).splitlines()
    table_s, dynamic_s = (
        found.compared.figures[name, "link-0.5"].seconds[0] for name in names
    )
    assert f" {table_s / dynamic_s:.3f} (" in late
    assert float(late.split()[-1]) >= table_s / dynamic_s
    assert peaks.startswith("activations ")
    quiet_only = replace(compared, names=["quiet"])
    part = replace(part, comparisons=[quiet_only], most_overhead=0.02)
    found = dynamic_order.run(part, SIZES, 2)
    assert not found.compared.failures
    [added] = found.compared.figures[names[1], "quiet"].overheads
    assert added >= 0, "the replay is the shortest time for the order that ran"
    last = dynamic_order.text_of(found).splitlines()[-2]
    assert re.match(rf"{re.escape(names[1])} +{100 * added:.2f} \(", last)


def test_what_to_expect_is_the_simulation_of_the_same_draws() -> None:
    names = ("interleaved chunks=2, static", "interleaved chunks=2, hint +1")
    found = {
        n: scenarios.expect(ordered(n), SIZES, ["quiet", "link-0.5"]) for n in names
    }
    table = generate("interleaved", PP, MICROBATCHES)
    quiet = found[names[0]]["quiet"]
    assert quiet.seconds == [
        pytest.approx(simulate(table, Costs(latency=0.01)).makespan)
    ]
    late = {name: median(found[name]["link-0.5"].seconds) for name in names}
    assert late[names[1]] < late[names[0]]
