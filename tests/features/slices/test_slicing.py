"""Slices: what a table of them takes, and that it is one for any schedule, cost and order."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext import cli
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Action, Costs, Schedule, generate, simulate, validate
from megatron_ext.schedules.drawing import render
from megatron_ext.schedules.search.dynamic import simulate_dynamic
from megatron_ext.schedules.search.patience import policies
from megatron_ext.schedules.search.policies import activation_cap
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.communication import exchanges
from megatron_ext.schedules.table.memory import measure
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.slices import shares_of_equal_cost
from megatron_ext.schedules.table.validation import check_first_gradients
from tests.pipelines import make_pipeline
from tests.schedules.reference import text
from tests.schedules.strategies import schedules


@pytest.mark.parametrize(
    ("name", "options", "bubble", "peak"),
    [
        ("1f1b", {}, 2.625, 1.875),
        ("zb-h1", {}, 0.875, 1.875),
        ("zb-v", {}, 0.4375, 1.875),
        ("interleaved", {"chunks": 2}, 1.3125, 1.875),
        ("interleaved", {"chunks": 4}, 0.65625, 1.4375),
        ("v-half", {}, 1.1875, 1.5),
        ("dualpipe-v", {}, 0.4375, 1.9375),
        ("bitpipe", {"order": "zb"}, 0.1875, 2.75),
        ("bitpipe", {"order": "paper"}, 1.3125, 2.75),
    ],
)
def test_bubble_and_memory_of_eight_slices(
    name: str, options: dict[str, str], bubble: float, peak: float
) -> None:
    table = generate(name, 8, 16, slices=8, **options)  # type: ignore[arg-type]
    assert validate(table).ascending
    timeline = simulate(table)
    assert timeline.bubble == pytest.approx(bubble, abs=1e-5)
    assert timeline.peak_activations == peak
    whole = simulate(generate(name, 8, 16, **options))  # type: ignore[arg-type]
    assert timeline.ideal == pytest.approx(whole.ideal)
    assert timeline.messages == 8 * whole.messages


@pytest.mark.parametrize("num_slices", [1, 4, 16])
def test_one_f_one_b_has_closed_forms(num_slices: int) -> None:
    """A bubble of 1F1B's over k, (pp - 1 + k)/k micro-batches, and two of keys and values."""
    for name, one_fill in (("1f1b", 3), ("zb-h1", 1)):
        timeline = simulate(generate(name, 8, 16, slices=num_slices))
        assert timeline.bubble == pytest.approx(7 * one_fill / num_slices)
        assert timeline.peak_activations == (7 + num_slices) / num_slices
        assert timeline.keys_and_values == {1: 0, 4: 5, 16: 4}[num_slices]


def test_keys_and_values_are_those_of_micro_batches_under_way() -> None:
    rows = (
        tuple(map(Action.parse, "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1".split())),
    )
    table = Schedule("mine", linear(1), 2, rows, slices=(0.625, 0.375))
    validate(table)
    # Both micro-batches', and gradients of the first's until its last backward.
    assert measure(table).keys_and_values == (3.0,)
    assert measure(table).activations == (1.625,)
    assert simulate(table).ends[0][:3] == [0.625, 1.0, 1.625]


@given(st.integers(1, 64), st.floats(0, 1))
@example(52, 1e-6)
def test_slices_of_equal_cost(num_slices: int, attention: float) -> None:
    shares = shares_of_equal_cost(num_slices, attention)
    assert sum(shares) == 1
    # Later slices are no longer, but for the rounding of three ends to multiples of 2**-30.
    assert all(after <= before + 2**-29 for before, after in pairwise(shares))
    for number, end in enumerate(accumulate(shares), start=1):
        cost = (1 - attention) * end + attention * end * end
        assert cost == pytest.approx(number / num_slices, abs=1e-8)
    if attention < 1:
        factors = Costs(attention=attention).slice_factors(shares)
        for kind in ("F", "B"):
            assert factors[kind] == pytest.approx(
                [1 / num_slices] * num_slices, abs=1e-8
            )


@pytest.mark.parametrize(("attention", "bubble"), [(0.3, 15.1), (0.6, 27.6)])
def test_equal_lengths_are_a_trap(attention: float, bubble: float) -> None:
    costs = Costs(attention=attention)
    table = generate("1f1b", 8, 16, costs=costs, slices=8)
    assert simulate(table, costs).bubble == pytest.approx(2.625, abs=1e-5)
    assert simulate(table, costs).peak_activations < 2.2
    equal = replace(table, slices=shares_of_equal_cost(8))
    assert simulate(equal, costs).bubble == pytest.approx(bubble, abs=0.05)


@pytest.mark.parametrize("attention", [0.3, 0.6])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_split_backwards_are_near_the_ideal(name: str, attention: float) -> None:
    # All attention of a backward is in its I, so I and W of slices differ, their sum does not.
    costs = Costs(1, 1 + attention, 1 - attention, attention=attention)
    timeline = simulate(generate(name, 8, 16, costs=costs, slices=8), costs)
    even = simulate(generate(name, 8, 16, slices=8))
    assert timeline.makespan < 1.05 * even.makespan


@given(schedules(largest=10), st.integers(0, 99))
def test_any_table_is_one_of_slices(schedule: Schedule, seed: int) -> None:
    report = validate(schedule)
    text = table_files.csv_text(schedule)
    loaded = table_files.from_csv(text, "csv:x")
    assert (loaded.rows, loaded.num_slices) == (schedule.rows, schedule.num_slices)
    assert table_files.from_json(table_files.json_text(schedule)) == schedule
    if schedule.num_slices == 1 or not report.ascending:
        return
    assert schedule.digest != replace(schedule, slices=shares_of_equal_cost(1)).digest
    costs = Costs(latency=0.2, jitter=0.3, link_jitter=1.0, seed=seed)
    made = policies("hint", schedule, extra_activations=1)
    dynamic = simulate_dynamic(schedule, made, costs)
    assert validate(dynamic.schedule).ascending
    share = schedule.pp / schedule.num_stages
    assert dynamic.peak_activations <= share * activation_cap(schedule, 1)
    for ran, row in zip(dynamic.schedule.rows, schedule.rows, strict=True):
        assert sorted(ran) == sorted(row)


def test_a_slice_has_its_own_messages() -> None:
    table = generate("zb-h1", 2, 2, slices=3)
    program = [text(t) for e in exchanges(table, 0) for t in (*e.inputs, *e.outputs)]
    assert program[:4] == ["0SEND_F0", "0SEND_F0.1", "0SEND_F0.2", "0SEND_F1"]
    assert program[4] == "0RECV_B0.2"
    [gradient] = exchanges(table, 0)[4].inputs
    assert (
        str(gradient.message)
        == "the gradient that stage 0 needs for slice 2 of micro-batch 0"
    )


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("0F0.1 0F0 0B0.1 0B0", "0F0.1 cannot run here: 0F0 has to run before it, because"),
        ("0F0 0F0.1 0B0 0B0.1", "0B0 cannot run here: 0B0.1 has to run before it, because"),
        ("0F0 0B0 0F0.1 0B0.1", "0B0 cannot run here: 0B0.1 has to run before it"),
        ("0F0 0F0.1 0B0.1", "never runs 0B0; each of its stages needs F and B (or I and W) for"),
        ("0F0 0F0.1", "for each of the 2 slices of each of the 1 micro-batches"),
        ("0F0 0F0.1 0F0.2", "micro-batches have 2 slices, 0 to 1"),
        ("0F0 0F0.1 0I0.1 0I0 0W0.1", "never runs 0W0;"),
    ],
)  # fmt: skip
def test_the_order_of_slices_is_checked(row: str, rule: str) -> None:
    rows = (tuple(map(Action.parse, row.split())),)
    with pytest.raises(ScheduleError, match=re.escape(rule)):
        validate(Schedule("mine", linear(1), 1, rows, slices=(0.5, 0.5)))


def test_slices_of_a_file_are_not_paired(tmp_path) -> None:
    (tmp_path / "mine.csv").write_text(
        table_files.csv_text(generate("zb-h1", 2, 4, slices=2))
    )
    with pytest.raises(
        ScheduleError, match="slices cannot run as pairs; disable pairs"
    ):
        generate(f"csv:{tmp_path}/mine.csv", pairs=True)


def test_what_cannot_have_slices_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="on different ranks, but both ranks would need the keys"
    ):
        generate("fbd", 4, 4, slices=2)
    with pytest.raises(
        ScheduleError, match="slices cannot run as pairs; disable slices"
    ):
        generate("1f1b", 4, 8, slices=2, pairs=True)
    with pytest.raises(ScheduleError, match="a micro-batch has 1 to 64 slices, got 65"):
        generate("1f1b", 4, 8, slices=65)
    with pytest.raises(
        ScheduleError, match="share of attention must be at least 0 and below 1"
    ):
        Costs(attention=1.0)
    with pytest.raises(ScheduleError, match="use --no-gradient-accumulation-fusion"):
        check_first_gradients(generate("1f1b", 2, 2, slices=2), 0)


def test_plan_and_plot_show_slices(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = ["--pp", "8", "--microbatches", "16", "--slices", "8"]
    assert cli.main(["plan", "--schedule", "zb-h1", *sizes, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["bubble"], found["peak_activations"]) == (0.875, 1.875)
    assert (found["options"], found["slices"]) == ({"slices": 8}, [0.125] * 8)
    assert found["peak_keys_and_values"] == 4
    assert cli.main(["plan", *sizes]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].endswith("messages  keys, values")
    assert "1f1b slices=8" in printed
    path = tmp_path_factory.mktemp("plot") / "table.csv"
    assert cli.main(["plot", "1f1b", "--pp", "2", "--microbatches", "2", "--slices", "2",
                     "-o", str(path)]) == 0  # fmt: skip
    assert cli.main(["plan", "--schedule", f"csv:{path}", "--slices", "4"]) == 2
    assert "the file fixes the number of slices at 2, got 4" in capsys.readouterr().err
    assert (
        cli.main(["plan", "--schedule", f"csv:{path}", "--attention", "0.5", "--json"])
        == 0
    )
    [found] = json.loads(capsys.readouterr().out)
    assert found["slices"] == list(shares_of_equal_cost(2, 0.5))


def test_the_picture_of_slices() -> None:
    timeline = simulate(generate("zb-h1", 2, 2, slices=2))
    kinds = "F forward, I input gradient, W weight gradient"
    assert render.picture(timeline).splitlines() == [
        "zb-h1 slices=2: pp 2, m 2, makespan 6.5, bubble 0.5 (7.7 %), peak 1.5",
        "0|F0.0 F0.1 F1.0 .    I0.1 W0.1 F1.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0",
        "1|.    F0.0 F0.1 I0.1 F1.0 I0.0 W0.1 F1.1 I1.1 W0.0 I1.0 W1.1 W1.0",
        f"{kinds}, F0.1 slice 1 of micro-batch 0, one column: 0.5",
    ]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved"])
def test_a_dynamic_order_keeps_the_bound_on_memory_in_slices(name: str) -> None:
    policy = DynamicOrder(policy="hint", extra_activations=0)
    pipeline = make_pipeline(
        name, 4, 8, slices=4, dynamic=policy, costs=Costs(attention=0.5)
    )
    table, shorter = pipeline.full, 0
    bound = simulate(table).peak_activations
    for seed in range(3):
        costs = Costs(
            attention=0.5, jitter=0.5, link_jitter=0.5, latency=0.2, seed=seed
        )
        found = simulate_dynamic(table, lambda rank: pipeline.policy(8, rank), costs)
        assert found.peak_activations <= bound
        shorter += found.makespan < simulate(table, costs).makespan
    assert shorter == 3, "ranks did not run what was ready instead of waiting"
