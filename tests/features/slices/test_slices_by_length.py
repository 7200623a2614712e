"""Tables whose micro-batches have different numbers of slices, and the cuts that they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config import active
from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig
from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_slices import (
    SLICED_BY_LENGTH,
    automatic_slice_tokens,
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.runtime import program
from megatron_ext.schedules import Action, Costs, Schedule, generate, simulate, validate
from megatron_ext.schedules.comparison import figures
from megatron_ext.schedules.search import queues
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import policies
from megatron_ext.schedules.search.policies import activation_cap
from megatron_ext.schedules.search.queues import check_queues
from megatron_ext.schedules.table import communication, table_files
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.schedules.table.memory import activation_peaks, measure
from megatron_ext.schedules.table.slices import MAX_SLICES
from tests.features.slices.step_tables import table_of_step
from tests.pipelines import make_pipeline

COST = LengthCost(1.0, 1 / 64)


def table_of(
    name: str,
    pp: int,
    lengths: list[int],
    slice_tokens: int,
    costs: Costs | None = None,
) -> Schedule:
    """The table of micro-batches of these lengths, in this order, in slices of so many tokens."""
    longest = max(lengths) or 1
    sizes = []
    for length in lengths:
        bounds = equal_cost_bounds([length], slices_needed(length, slice_tokens), COST)
        sizes.append(tuple((end - begin) / longest for begin, end in pairwise(bounds)))
    if costs is None:
        costs = Costs(attention=COST.attention_share(longest))
    return generate(name, pp, len(lengths), costs=costs, slice_sizes=tuple(sizes))


@pytest.mark.parametrize("pp", [2, 5])
@pytest.mark.parametrize(
    "lengths",
    [
        [0],
        [1, 7],
        [0, 0, 64],
        [64],
        [61, 8, 8, 7, 8, 16, 13, 61],
        [0, 64, 7, 13, 0, 17, 64, 0, 0],
        [16, 64, 16, 0, 17, 13, 9, 1],
    ],
)
@pytest.mark.parametrize("name", SLICED_BY_LENGTH)
def test_any_lengths_have_a_table(name: str, lengths: list[int], pp: int) -> None:
    table = table_of(name, pp, lengths, 8)
    report = validate(table)
    assert report.ascending
    check_queues(table)
    num_slices = sum(slices_needed(length, 8) for length in lengths)
    forwards = sum(action.kind == "F" for row in table.rows for action in row)
    assert forwards == num_slices * table.num_stages
    assert table.places_per_stage == len(lengths) * table.num_slices
    costs = Costs(attention=COST.attention_share(max(lengths) or 1))
    timeline = simulate(table, costs)
    assert timeline.makespan >= 0
    crossing = [hop for hop in table.placement.hops if hop != "local"]
    assert timeline.messages == 2 * len(crossing) * num_slices
    if name == "interleaved":
        return
    # The peak is at most that of slices which all have the largest size, and one of them.
    even_sizes = ((1.0,) * table.num_slices,) * len(lengths)
    uniform = generate(name, pp, len(lengths), slice_sizes=even_sizes)
    largest = max(max(sizes) for sizes in table.slice_sizes)
    share = pp / table.num_stages
    assert (
        max(activation_peaks(table))
        <= largest * (max(activation_peaks(uniform)) + share) + 1e-9
    )


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_same_number_everywhere_is_the_table_of_equal_slices(count: int) -> None:
    shares = (0.5, 0.25, 0.25)
    for name in ("1f1b", "zb-h1", "gpipe"):
        by_length = generate(name, 4, count, slice_sizes=(shares,) * count)
        assert by_length.rows == generate(name, 4, count, slices=3).rows
        assert measure(by_length) == measure(
            replace(by_length, slice_sizes=(), slices=shares)
        )


def test_slices_of_different_sizes_survive_a_file() -> None:
    table = table_of("zb-h1", 2, [16, 64, 8], 8)
    assert table_files.from_json(table_files.json_text(table)) == table
    numbers = figures(simulate(table))
    assert numbers["slice_sizes"] == [list(sizes) for sizes in table.slice_sizes]
    assert "slices" not in numbers


def test_too_many_slices_name_the_flags_of_slices() -> None:
    sizes = ((1 / MAX_SLICES,) * MAX_SLICES,) * 80
    with pytest.raises(
        ScheduleError, match=r"5120 slices needs .*--pipeline-slice-tokens higher"
    ):
        generate("1f1b", 512, 80, slice_sizes=sizes)
    with pytest.raises(
        ScheduleError, match=r"5120 micro-batches needs .*; use fewer; beyond"
    ):
        generate("1f1b", 512, 5120)


def test_a_dynamic_order_waits_by_the_costs_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = []
    monkeypatch.setattr(
        active, "policies", lambda *_, costs, **__: simulated.append(costs)
    )
    pipeline = make_pipeline("1f1b", 2, 2, slice_tokens=8, dynamic=DynamicOrder())
    table = table_of_step(pipeline, [[8, 8], [5]], COST)
    pipeline.policies_of(table.schedule, table.costs)
    assert [costs.attention for costs in simulated] == [COST.attention_share(16)]


def test_the_table_of_a_step_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []

    def counted(check: Callable[..., Any], *arguments: Any) -> Any:
        checks.append(check.__name__)
        return check(*arguments)

    for module in (active, program):
        for check in (validate, check_queues):
            monkeypatch.setattr(module, check.__name__, partial(counted, check))
    pipeline = make_pipeline("1f1b", 2, 3, slice_tokens=8, transport="torch")
    table = table_of_step(pipeline, [[8], [8, 8], [0]], COST)
    assert sorted(checks) == ["check_queues", "validate"]
    assert "order" in vars(table), "the check and the program share it"


def test_a_rank_derives_the_messages_of_its_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of all ranks would take longer than all else that the table of a step needs."""
    derived = []

    def recorded(table: Schedule, rank: int, *window: Any) -> Any:
        derived.append(rank)
        return communication.exchanges(table, rank, *window)

    monkeypatch.setattr(queues, "exchanges", recorded)
    monkeypatch.setattr(program, "exchanges", recorded)
    for name, rank, neighbours in (
        ("zb-v", 4, [3, 4, 5]),
        ("zb-h1", 0, [0, 1]),
        ("interleaved", 7, [0, 6, 7]),
    ):
        derived.clear()
        pipeline = make_pipeline(name, 8, 3, slice_tokens=8, transport="shm")
        table = table_of_step(pipeline, [[8], [8, 8], [4]], COST, rank)
        peers = program.Peers(range(8))
        shapes: Any = {"F": [None], "B": [None]}
        program.make_program(
            table, program.PipelineEnds.of_shapes(peers, shapes, torch.float32)
        )
        assert sorted(derived) == neighbours


def test_a_dynamic_order_keeps_to_the_peak_of_the_table() -> None:
    lengths = [3, 8, 9, 61, 64, 5]
    for name in ("zb-h1", "1f1b"):
        table = table_of(name, 4, lengths, 8)
        costs = Costs(attention=0.4, jitter=0.3)
        chosen = policies(
            "hint", table, extra_activations=0, weights_fill=False, costs=costs
        )
        timeline = simulate_dynamic(table, chosen, costs)
        assert timeline.peak_activations <= activation_cap(table) + 1e-9
        assert sorted(map(sorted, timeline.schedule.rows)) == sorted(
            map(sorted, table.rows)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("0F1.1", "micro-batch 1 has 1 slices, 0 to 0"),
        ("0F0.2", "micro-batch 0 has 2 slices, 0 to 1"),
    ],
)
def test_a_slice_too_many_is_refused(change: str, message: str) -> None:
    table = generate("1f1b", 1, 2, slice_sizes=((0.5, 0.5), (0.25,)))
    [row] = table.rows
    wrong = replace(table, rows=((*row, Action.parse(change)),))
    with pytest.raises(ScheduleError, match=message):
        validate(wrong)


def test_a_missing_slice_is_found() -> None:
    table = generate("1f1b", 1, 2, slice_sizes=((0.5, 0.5), (0.25,)))
    [row] = table.rows
    kept = tuple(action for action in row if action.microbatch != 1)
    with pytest.raises(ScheduleError, match="rank 0 never runs 0F1"):
        validate(replace(table, rows=(kept,)))


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([LengthCost(1, 0), LengthCost(1, 0.01), LengthCost(0, 1)]),
)
def test_bounds_cover_a_micro_batch(
    samples: list[int], num_slices: int, multiple: int, cost: LengthCost
) -> None:
    num_tokens = sum(samples)
    if num_tokens % multiple:
        with pytest.raises(ScheduleError, match=f"pad it to a multiple of {multiple}"):
            equal_cost_bounds(samples, num_slices, cost, multiple)
        return
    bounds = equal_cost_bounds(samples, num_slices, cost, multiple)
    assert bounds[0] == 0
    assert bounds[-1] == num_tokens
    assert len(bounds) == num_slices + 1
    widths = [end - begin for begin, end in pairwise(bounds)]
    assert all(width >= 0 and width % multiple == 0 for width in widths)
    # Only the last slices are empty, and only if there are too few tokens.
    filled = min(num_slices, num_tokens // multiple)
    assert all(width > 0 for width in widths[:filled])
    assert not any(widths[filled:])


def test_slices_cost_the_same() -> None:
    cost = LengthCost(1.0, 1e-3)
    samples = [4000, 200, 3000]
    bounds = equal_cost_bounds(samples, 5, cost)

    def cost_before(token: int) -> float:
        before = 0.0
        for sample in samples:
            inside = min(max(token, 0), sample)
            before += cost.of_length(inside)
            token -= sample
        return before

    costs = [cost_before(end) - cost_before(begin) for begin, end in pairwise(bounds)]
    assert costs == pytest.approx([cost.of_pack(samples) / 5] * 5, rel=0.01)


def test_numbers_of_slices() -> None:
    assert [slices_needed(tokens, 8) for tokens in (0, 1, 8, 9, 512)] == [
        1,
        1,
        1,
        2,
        64,
    ]
    with pytest.raises(ScheduleError, match="use --pipeline-slice-tokens 9 or more"):
        slices_needed(513, 8)
    assert rising([3.0, 1.0, 1.0]) == (1, 2, 0)
    assert automatic_slice_tokens(131072, 128 * 8192, 8) == 8192
    assert automatic_slice_tokens(1, 1, 8) == automatic_slice_tokens(0, 0, 8) == 1
    # At most 64 slices.
    assert slices_needed(1000, automatic_slice_tokens(1000, 1000, 100)) <= 64
    # A step of 128 equal micro-batches has enough of them.
    assert automatic_slice_tokens(2048, 128 * 2048, 2) == 4096


@pytest.mark.parametrize(
    ("pp", "num_microbatches", "num_slices"), [(4, 8, 8), (8, 16, 2)]
)
def test_slices_of_unequal_cost_have_a_table(
    pp: int, num_microbatches: int, num_slices: int
) -> None:
    """The search got stuck at its memory cap if later slices were slower than earlier ones."""
    config = PipelineConfig(schedule="zb-v", slice_tokens=4, transport="shm")
    pipeline = active.Pipeline(config, pp, num_microbatches)
    tokens_of_slices = [[4] * num_slices] * num_microbatches
    cost = LengthCost(1.0, 0.6 / (4 * num_slices))
    table = table_of_step(pipeline, tokens_of_slices, cost)
    validate(table.schedule)
