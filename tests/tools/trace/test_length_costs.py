"""The cost of a length is measured: the coefficients that made the durations of a trace."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext import cli
from megatron_ext.errors import DataError
from megatron_ext.schedules import Costs, generate
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tools.trace.length_costs import Point, fit, measured_length_cost
from megatron_ext.tracing.records import FILE_NAME, SCHEDULE_FILE
from tests.tools.trace.runs import trace_of, write_run

LENGTHS = (100, 4000, 300, 50, 2500, 900, 4000, 10)
TRUE = LengthCost(2e-6, 5e-9)


def _points(cost: LengthCost, lengths: list[int], noise: list[float]) -> list[Point]:
    return [
        Point(n, n * n, factor * cost.of_length(n))
        for n, factor in zip(lengths, noise, strict=True)
    ]


@given(
    st.floats(1e-9, 1e-3),
    st.floats(1e-12, 1e-6),
    st.lists(st.integers(1, 100_000), min_size=3, max_size=40, unique=True),
)
def test_exact_durations_tell_what_a_length_costs(
    linear: float, quadratic: float, lengths: list[int]
) -> None:
    cost = LengthCost(linear, quadratic)
    found = fit(_points(cost, lengths, [1.0] * len(lengths)))
    if found is None:
        assert max(lengths) < 2 * min(lengths), "lengths that differ tell it"
        return
    for length in lengths:
        assert found.of_length(length) == pytest.approx(
            cost.of_length(length), rel=1e-3
        )


def test_noise_and_a_pause_of_the_machine_hardly_matter() -> None:
    draw = random.Random(3)
    lengths = [draw.randint(10, 8000) for _ in range(200)]
    noise = [draw.lognormvariate(0, 0.05) for _ in lengths]
    noise[7] = 40.0
    found = fit(_points(TRUE, lengths, noise))
    assert found is not None
    for length in (500, 1000, 4000, 8000):
        assert found.of_length(length) == pytest.approx(TRUE.of_length(length), rel=0.1)


@pytest.mark.parametrize(("linear", "quadratic"), [(1e-6, 0.0), (0.0, 1e-9)])
def test_coefficients_are_not_negative(linear: float, quadratic: float) -> None:
    draw = random.Random(1)
    lengths = [draw.randint(10, 8000) for _ in range(50)]
    noise = [draw.lognormvariate(0, 0.2) for _ in lengths]
    found = fit(_points(LengthCost(linear, quadratic), lengths, noise))
    assert found is not None
    assert min(found.linear, found.quadratic) >= 0


def _run(tmp_path: Path, lengths: tuple[int, ...] = LENGTHS, **options: object) -> Path:
    """Write a run of four ranks whose stages take `TRUE` together for each micro-batch."""
    took = tuple(map(TRUE.of_length, lengths))
    costs = Costs(1 / 12, 1 / 12, 1 / 12, microbatch_scale=took)
    sizes = [(length, length**2) for length in lengths]
    return write_run(tmp_path, costs=costs, **{"sizes": sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_a_run_tells_what_a_length_costs_its_stages_together(
    tmp_path: Path, schedule: str
) -> None:
    cost, errors = measured_length_cost(read_run(_run(tmp_path, schedule=schedule)))
    assert cost.linear == pytest.approx(TRUE.linear, rel=1e-2)
    assert cost.quadratic == pytest.approx(TRUE.quadratic, rel=1e-2)
    assert statistics.median(errors) < 0.02
    stages = 8 if schedule == "interleaved" else 4
    assert len(errors) == 2 * stages * len(LENGTHS), "all but the first iteration"


def test_slices_of_one_length_tell_it_too(tmp_path: Path) -> None:
    length = 4000
    share = TRUE.attention_share(length)
    scale = (TRUE.of_length(length),) * 8
    costs = Costs(1 / 12, 1 / 12, 1 / 12, attention=share, microbatch_scale=scale)
    folder = write_run(tmp_path, costs=costs, slices=4, sizes=[(length, length**2)] * 8)
    cost, _ = measured_length_cost(read_run(folder))
    assert cost.linear == pytest.approx(TRUE.linear, rel=1e-2)
    assert cost.quadratic == pytest.approx(TRUE.quadratic, rel=1e-2)


def test_tensor_parallel_ranks_count_once(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    alone = measured_length_cost(read_run(folder))
    for rank in range(4):
        text = trace_of(folder, rank).read_text()
        assert '"tensor":0' in text
        twice = folder / FILE_NAME.format(0, rank, 1)
        twice.write_text(
            text.replace('"tensor":0', '"tensor":1').replace('"rank":', '"rank":1')
        )
    assert measured_length_cost(read_run(folder)) == alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"sizes": ()},
            "contains no micro-batch lengths; trace one of this package's schedules",
        ),
        (
            {"settings": {"slice_tokens": 8}},
            "with --pipeline-slice-tokens, .* trace a run without",
        ),
        (
            {"lengths": (70,) * 8},
            "all micro-batches have the same length, which is not enough to fit the cost",
        ),
    ],
)
def test_traces_that_do_not_tell_it_are_refused(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        measured_length_cost(read_run(_run(tmp_path, **options)))  # type: ignore[arg-type]


def test_mirrored_pipelines_are_refused(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    (folder / SCHEDULE_FILE).write_text(
        table_files.json_text(generate("bitpipe", 4, 8))
    )
    with pytest.raises(
        DataError, match="under bitpipe, stages run micro-batches that another"
    ):
        measured_length_cost(read_run(folder))


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = _run(tmp_path)
    lengths = tmp_path / "lengths"
    lengths.write_text("\n".join(map(str, 40 * LENGTHS)))
    words = f"plan --max-tokens 4000 --lengths {lengths}".split()
    assert cli.main([*words, "--trace-dir", str(folder)]) == 0
    words += "--pp 4 --microbatches 8".split()
    printed = capsys.readouterr()
    [told] = [
        line for line in printed.err.splitlines() if line.startswith("--length-costs ")
    ]
    given = told.split()[1].rstrip(":")
    assert LengthCost.parse(given).quadratic == pytest.approx(TRUE.quadratic, rel=1e-2)
    assert cli.main([*words, "--length-costs", given]) == 0
    assert capsys.readouterr().out == printed.out
    assert cli.main([*words, "--trace-dir", str(folder), "--microbatches", "0"]) == 2
    assert "--microbatches 0 must be 1 or more" in capsys.readouterr().err
    assert cli.main([*words, "--trace-dir", str(folder), "--hidden-size", "8"]) == 2
    assert "remove --hidden-size" in capsys.readouterr().err
