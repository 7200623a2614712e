"""What a traced run measured: its file, and the times of another cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.planning.measured import COSTS_FILE, SIZES, MeasuredCosts, cut_anew
from tests.commands import run_package
from tests.tools.trace.runs import COSTS, write_run

if TYPE_CHECKING:
    from pathlib import Path


def test_they_survive_their_file(tmp_path: Path) -> None:
    stages = ((0.01, 0.02, 0.03), (0.04, 0.05, 0.06))
    measured = MeasuredCosts(stages=stages, latency_s=0.1, sizes={"seq_length": 2048})
    (tmp_path / COSTS_FILE).write_text(measured.as_json())
    assert MeasuredCosts.read(tmp_path) == measured


@given(
    st.lists(st.floats(0.1, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any),
)
def test_a_cut_keeps_the_time_of_the_model(
    times: list[float], layers_by_stage: list[int]
) -> None:
    stages = cut_anew([(time, 2 * time, time) for time in times], layers_by_stage)
    assert len(stages) == len(layers_by_stage)
    assert sum(map(sum, stages)) == pytest.approx(4 * sum(times))
    assert all(forward > 0 for forward, _input, _weight in stages)


def test_more_layers_take_longer() -> None:
    even = (1.0, 1.0, 1.0)
    assert cut_anew([even] * 4, [1, 3]) == ((1.0, 1.0, 1.0), (3.0, 3.0, 3.0))


def test_aggregate_writes_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path, schedule="zb-h1")
    done = run_package("aggregate", "--trace-dir", str(folder))
    assert (
        f"wrote {folder / COSTS_FILE}, for --pipeline-schedule auto:{folder}"
        in done.stdout
    )
    measured = MeasuredCosts.read(folder)
    assert measured.stages[0] == pytest.approx(
        (COSTS.forward, COSTS.input, COSTS.weight)
    )
    assert measured.latency_s == pytest.approx(COSTS.latency)
    assert measured.sizes.keys() <= {*SIZES}
