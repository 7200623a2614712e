"""Simulated devices whose host takes time to launch an action."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import policies
from megatron_ext.schedules.search.progress import Progress
from megatron_ext.schedules.table.costs import AHEAD
from megatron_ext.schedules.table.transforms import split_backwards

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline

_TABLES = {
    name: split_backwards(generate(name, 4, 16))
    for name in ("1f1b", "interleaved", "bitpipe", "zb-v", "zb-h1", "v-half")
}


def _runs(name: str, costs: Costs) -> tuple[Timeline, Timeline]:
    table = _TABLES[name]
    fills = name in ("1f1b", "interleaved", "bitpipe")
    policy = policies("hint", table, weights_fill=fills)
    return simulate(table, costs), simulate_dynamic(table, policy, costs)


def test_short_launches_are_hidden_but_the_first() -> None:
    table = generate("1f1b", 1, 4)
    assert simulate(table, Costs(launch=0.25)).makespan == 12.25
    assert (
        simulate_dynamic(table, policies("hint", table), Costs(launch=0.25)).makespan
        == 12.25
    )


def test_those_of_pairs_are_hidden_too() -> None:
    """A pair is one launch, behind which the host may be ahead by another."""
    table = generate("1f1b", 2, 4, pairs=True)
    policy = policies("hint", table)
    assert simulate(table).makespan == 15
    assert simulate(table, Costs(launch=0.25)).makespan == 15.25
    assert simulate_dynamic(table, policy, Costs(launch=0.25)).makespan == 15.5


def test_a_slow_host_sets_the_pace() -> None:
    """Eight launches of 3, and then the last backward of 2."""
    assert simulate(generate("1f1b", 1, 4), Costs(launch=3)).makespan == 8 * 3 + 2


@pytest.mark.parametrize("name", _TABLES)
def test_hosts_are_at_most_two_actions_ahead(name: str) -> None:
    costs = Costs(latency=0.05, jitter=0.3, seed=3, launch=0.02)
    for timeline in _runs(name, costs):
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
            assert starts[0] >= costs.launch
            assert all(
                end <= start for end, start in zip(ends, starts[1:], strict=False)
            )
            for before, start in zip(ends, starts[AHEAD:], strict=False):
                assert start >= before + costs.launch - 1e-9


@pytest.mark.parametrize("name", _TABLES)
def test_without_news_of_launches_a_jump_waits_for_the_end_of_the_last_action(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "expects", lambda _: True)
    monkeypatch.setattr(Progress, "follower", lambda *_: None)
    costs = Costs(latency=0.5, jitter=0.3, link_jitter=1.0, seed=1, launch=0.02)
    static, dynamic = _runs(name, costs)
    num_jumps = 0
    for rank, row in enumerate(dynamic.schedule.rows):
        position = {
            action: index for index, action in enumerate(static.schedule.rows[rank])
        }
        places = [position[action] for action in row]
        assert sorted(places) == list(range(len(row)))
        ends, starts = dynamic.ends[rank], dynamic.starts[rank]
        for number, (_, place) in enumerate(pairwise(places), start=1):
            head = min(set(range(len(row))) - set(places[:number]))
            is_split_by_us = static.schedule.rows[rank][head].kind == "W"
            if place != head and not is_split_by_us:  # a ready W may be left for better
                num_jumps += 1
                assert starts[number] >= ends[number - 1] + costs.launch - 1e-9
    assert num_jumps


@pytest.mark.parametrize("name", ["1f1b", "bitpipe", "v-half"])
def test_news_of_launches_hide_the_launches_of_jumps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policies(
        "hint", _TABLES[name], extra_activations=1, weights_fill=name != "v-half"
    )

    def total() -> float:
        draws = (
            Costs(latency=0.01, jitter=0.3, seed=seed, launch=0.1) for seed in range(16)
        )
        return sum(
            simulate_dynamic(_TABLES[name], policy, costs).makespan for costs in draws
        )

    heard = total()
    monkeypatch.setattr(Progress, "expects", lambda _: True)
    assert heard < 0.998 * total()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "bitpipe", "zb-v", "zb-h1"])
def test_while_nothing_is_late_a_dynamic_order_takes_the_time_of_its_table(
    name: str,
) -> None:
    static, dynamic = _runs(name, Costs(latency=0.02, launch=0.02))
    assert dynamic.makespan <= static.makespan / 0.99


@pytest.mark.parametrize("name", _TABLES)
def test_heads_that_follow_their_senders_hide_launches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def total() -> float:
        draws = (
            Costs(latency=0.01, jitter=0.3, seed=seed, launch=0.1) for seed in range(8)
        )
        return sum(_runs(name, costs)[1].makespan for costs in draws)

    monkeypatch.setattr(
        Progress, "expects", lambda _: True
    )  # the effect of following alone
    followed = total()
    monkeypatch.setattr(Progress, "follower", lambda *_: None)
    assert followed < 0.995 * total()


def test_jumps_that_follow_the_sender_of_the_head_hide_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = Costs(latency=0.01, launch=0.15)
    followed, follower = _runs("interleaved", costs)[1].makespan, Progress.follower

    def only_the_head(progress: Progress, head: int) -> int | None:
        return head if follower(progress, head) == head else None

    monkeypatch.setattr(Progress, "follower", only_the_head)
    assert followed < 0.99 * _runs("interleaved", costs)[1].makespan


@pytest.mark.parametrize("name", _TABLES)
def test_a_head_that_is_launched_behind_its_sender_runs_when_its_input_is_there(
    name: str,
) -> None:
    costs = Costs(latency=0.1, jitter=0.3, seed=2, launch=0.02)
    dynamic = _runs(name, costs)[1]
    rank_of = dynamic.schedule.placement.rank_of
    starts, ends = (
        {
            action: time
            for row, times in zip(dynamic.schedule.rows, of_ranks, strict=True)
            for action, time in zip(row, times, strict=True)
        }
        for of_ranks in (dynamic.starts, dynamic.ends)
    )
    for action, start in starts.items():
        source = action._replace(stage=action.stage + (-1 if action.kind == "F" else 1))
        if action.kind != "W" and source in ends:
            crosses = rank_of[source.stage] != rank_of[action.stage]
            assert start >= ends[source] + (costs.latency if crosses else 0) - 1e-9


def test_a_launch_is_part_of_what_users_write() -> None:
    costs = Costs.parse("1,1.2,0.8,0.05,0.02")
    assert (costs.latency, costs.launch) == (0.05, 0.02)
    assert str(costs) == "1,1.2,0.8,0.05,0.02"
    assert str(Costs(launch=0.5)) == "1,1,1,0,0.5"
    assert Costs.parse("1,1,1").launch == 0.0
    for wrong in ("1,1,1,0,0.1,2", "1,1"):
        with pytest.raises(ScheduleError, match="three numbers"):
            Costs.parse(wrong)
    with pytest.raises(ScheduleError, match="launch time must be between 0 and"):
        Costs(launch=-1)
