"""Pairs: which tables have them, what they cost and hide, and which are none."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Action, Costs, Schedule, generate, simulate, validate
from megatron_ext.schedules.search.queues import check_queues
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.communication import exchanges
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.transforms import split_backwards
from tests.schedules import reference
from tests.schedules.strategies import schedules

EVEN = Costs(all_to_all=0.5)
"""All-to-all takes as long as the computation beside it."""
TABLES = [
    ("1f1b", {}),
    ("interleaved", {}),
    ("zb-h1", {}),
    ("zb-v", {}),
    ("v-half", {}),
    ("dualpipe", {}),
    ("dualpipe-v", {}),
    ("bitpipe", {"order": "zb"}),
    ("bitpipe", {"order": "paper"}),
]


def two_ranks(*rows: str, pairs: tuple[frozenset[int], ...]) -> Schedule:
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("mine", linear(2), 2, parsed, pairs=pairs)


@pytest.mark.parametrize(("name", "options"), TABLES)
@pytest.mark.parametrize(("pp", "m"), [(4, 16), (8, 24)])
def test_most_of_the_communication_is_hidden(
    name: str, options: dict[str, str], pp: int, m: int
) -> None:
    plain = generate(name, pp, m, costs=EVEN, **options)
    paired = generate(name, pp, m, costs=EVEN, pairs=True, **options)
    report = validate(paired)
    check_queues(paired)
    assert reference.ends_with_slots(paired, max(report.slots.values()))
    assert report.ascending == validate(plain).ascending
    assert {a for row in paired.rows for a in row} == {
        a for row in plain.rows for a in row
    }
    timeline = simulate(paired, EVEN)
    # V-half keeps too few micro-batches to have a partner for each; it gains least.
    assert timeline.hidden > (0.15 if name == "v-half" else 0.6)
    assert (
        timeline.makespan
        < (1 if name == "v-half" else 0.9) * simulate(plain, EVEN).makespan
    )
    assert not simulate(plain, EVEN).hidden


@given(schedules(largest=10, slices=False))
def test_any_table_takes_pairs(schedule: Schedule) -> None:
    options = {
        k: v for k, v in schedule.options.items() if k not in ("chunks", "overlap")
    }
    chunks = schedule.options.get("chunks")
    number = chunks if schedule.name == "interleaved" else None
    sizes = (schedule.pp, schedule.total_microbatches, number)
    paired = generate(schedule.name, *sizes, pairs=True, **options)  # type: ignore[arg-type]
    assert validate(paired).ascending
    check_queues(paired)
    for rank in range(len(paired.rows)):
        for index in paired.pairs_of(rank):
            forward, backward = paired.rows[rank][index : index + 2]
            assert (forward.kind, backward.kind in "BI") == ("F", True)
            assert forward.microbatch != backward.microbatch
    text = table_files.csv_text(paired)
    again = table_files.from_csv(text, "csv:x")
    assert (again.rows, again.pairs) == (paired.rows, paired.pairs)
    assert table_files.from_json(table_files.json_text(paired)).digest == paired.digest
    assert not paired.pairs or paired.digest != replace(paired, pairs=()).digest


@pytest.mark.parametrize(
    ("all_to_all", "hides", "time"),
    [
        (0.0, 1.0, 3.0),
        (0.25, 1.0, 2.5),
        (0.25, 0.5, 2.75),
        (0.75, 1.0, 1.5),
        (0.9, 1.0, 1.8),
    ],
)
def test_a_pair_takes_the_larger_of_both(
    all_to_all: float, hides: float, time: float
) -> None:
    rows = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    schedule = two_ranks(*rows, pairs=(frozenset(), frozenset({1})))
    timeline = simulate(schedule, Costs(all_to_all=all_to_all, hides=hides))
    assert (
        timeline.starts[1][1] == timeline.starts[1][2] == 2
    )  # when the inputs of both are there
    assert timeline.ends[1][1] == timeline.ends[1][2] == pytest.approx(2 + time)
    assert timeline.starts[0][2] == pytest.approx(
        2 + time
    )  # nothing leaves before both end


@pytest.mark.parametrize("all_to_all", [0.25, 0.75])
def test_layers_pair_one_to_one(all_to_all: float) -> None:
    """Of stages with different numbers of layers the rest of the longer one runs alone."""
    layers, hides = (6, 3, 1, 6), 0.5
    schedule = generate("interleaved", 2, 8, 2, pairs=True)
    stages = tuple((count / 2,) * 3 for count in layers)
    costs = Costs(all_to_all=all_to_all, hides=hides, stages=stages)
    timeline, seen = simulate(schedule, costs), set()
    for rank, row in enumerate(schedule.rows):
        for index in schedule.pairs_of(rank):
            ours, theirs = (layers[action.stage] for action in row[index : index + 2])
            # A stage is half of a device share; a layer takes 1 forwards and 2 backwards, of which
            # the weight gradient exchanges nothing.
            alone = (ours + 2 * theirs) / 2
            hidden = (
                hides * min(ours, theirs) / 2 * min(2 * all_to_all, 3 - 2 * all_to_all)
            )
            took = timeline.ends[rank][index] - timeline.starts[rank][index]
            assert took == pytest.approx(alone - hidden)
            seen.add((ours, theirs))
    assert len(seen) > 2


def test_a_pair_waits_for_all_inputs_and_sends_afterwards() -> None:
    schedule = generate("1f1b", 2, 3, pairs=True)
    assert list(schedule.cells(1)) == [
        "1F0",
        "(1F1;1B0)OVERLAP_F_B",
        "(1F2;1B1)OVERLAP_F_B",
        "1B2",
    ]
    middle = exchanges(generate("1f1b", 3, 4, pairs=True), 1)[3]
    assert [*map(str, middle.actions)] == ["1F3", "1B0"]
    assert [*map(reference.text, middle.all_inputs)] == ["1RECV_F3", "1RECV_B0"]
    assert [*map(reference.text, middle.all_outputs)] == ["1SEND_F3", "1SEND_B0"]
    program = [*map(reference.text, reference.lower(schedule)[1])]
    assert program[2:6] == ["1RECV_F1", "1F1", "1B0", "1SEND_B0"]


def test_backwards_are_split_inside_pairs() -> None:
    paired = generate("1f1b", 4, 8, pairs=True)
    split = split_backwards(paired)
    validate(split)
    assert [*split.cells(3)][1:3] == ["(3F1;3I0)OVERLAP_F_B", "3W0"]
    assert sum(map(len, split.pairs)) == sum(map(len, paired.pairs))


@pytest.mark.parametrize(
    ("pairs", "rule"),
    [
        ((frozenset({0}), frozenset()), "a pair is an F and the B or I right after it"),
        ((frozenset(), frozenset({0})), "both are for the same micro-batch"),
        ((frozenset({1}), frozenset()), None),
    ],
)
def test_what_is_no_pair_is_marked(
    pairs: tuple[frozenset[int], ...], rule: str | None
) -> None:
    schedule = two_ranks("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", pairs=pairs)
    if rule is None:
        validate(schedule)
        return
    with pytest.raises(ScheduleError, match=re.escape(rule)):
        validate(schedule)


def test_pairs_that_wait_for_each_other_are_a_cycle() -> None:
    rows = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    validate(two_ranks(*rows, pairs=()))
    schedule = two_ranks(*rows, pairs=(frozenset({1}), frozenset({1})))
    with pytest.raises(
        ScheduleError, match="0B0 on rank 0 needs 1B0, which comes after 1F1"
    ):
        validate(schedule)


def test_a_lead_grows_until_some_order_ends() -> None:
    """With these times no order ends that is ahead of its table by as little as usual."""
    costs = Costs(1.0, 1.0, 2.0, latency=0.5, all_to_all=0.3)
    plain, paired = (
        generate("bitpipe", 8, 24, costs=costs, pairs=both) for both in (False, True)
    )
    assert validate(paired).ascending
    assert simulate(paired, costs).makespan < simulate(plain, costs).makespan


def test_roles_have_no_pairs() -> None:
    with pytest.raises(
        ScheduleError, match="on different ranks, so no rank can pair them"
    ):
        generate("fbd", 4, 4, pairs=True)


@pytest.mark.parametrize(
    "settings", [{"all_to_all": 1.0}, {"all_to_all": -0.1}, {"hides": 1.5}]
)
def test_shares_are_shares(settings: dict[str, float]) -> None:
    with pytest.raises(
        ScheduleError, match=r"all-to-all .*must be (at least|between) 0"
    ):
        Costs(**settings)  # type: ignore[arg-type]


@given(st.sampled_from(TABLES), st.integers(1, 3))
def test_jitter_does_not_change_what_runs(
    case: tuple[str, dict[str, str]], seed: int
) -> None:
    name, options = case
    paired = generate(name, 4, 8, pairs=True, **options)  # type: ignore[arg-type]
    timeline = simulate(
        paired, Costs(jitter=0.2, latency=0.1, all_to_all=0.3, seed=seed)
    )
    assert timeline.ideal <= timeline.makespan
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        assert all(a <= b for a, b in itertools.pairwise(starts))
        assert all(a <= b for a, b in itertools.pairwise(ends))
