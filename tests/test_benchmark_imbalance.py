"""The simulation of experts with unequal loads: what fills waits, and what bounds it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.expert_imbalance import (
    Loads,
    Simulation,
    busiest,
    imbalance_of,
    loads_of,
    sigma_for,
)
from benchmarks.harness import loads as harness_loads
from benchmarks.harness.loads import Size, with_imbalance, workloads
from megatron_ext.schedules import Schedule, generate
from megatron_ext.schedules.table.transforms import weights_waiting
from tests.commands import run_python

_ROOT = Path(__file__).parents[1]
_TABLE = generate("zb-h1", 2, 8, pairs=True)
_WAITING = weights_waiting(_TABLE, 6)


def _time(
    table: Schedule, loads: Loads, *, fills: bool = False, share: float = 0.0
) -> float:
    return Simulation(
        table, loads, exchange=0.3, exchange_share=share, fills=fills
    ).time()


def _loads(imbalance: float) -> Loads:
    sigma = sigma_for(_TABLE, 4, imbalance)
    return loads_of(_TABLE, 4, sigma, seed=0)


def test_draws_have_the_imbalance() -> None:
    assert imbalance_of(_loads(1.66)) == pytest.approx(1.66, abs=0.01)


def test_the_gain_vanishes_if_w_never_overlaps() -> None:
    loads = _loads(1.66)
    in_place = _time(_TABLE, loads)
    assert _time(_WAITING, loads, fills=True) < in_place
    assert _time(_WAITING, loads, fills=False) >= 0.99 * in_place


def test_no_order_beats_the_busiest_rank() -> None:
    loads = _loads(2.2)
    work = 3 * 8 * 4 * 2 * busiest(_TABLE, loads)
    assert _time(_WAITING, loads, fills=True) > work


def test_balanced_experts_lose_nothing() -> None:
    loads = loads_of(_TABLE, 4, 0.0, seed=0)
    assert _time(_WAITING, loads, fills=True) <= 1.005 * _time(_TABLE, loads)


def test_exchanges_that_use_the_device_slow_it_down() -> None:
    loads = _loads(1.2)
    times = [
        _time(_WAITING, loads, fills=True, share=share) for share in (0.0, 0.1, 0.5)
    ]
    assert times == sorted(set(times))


_SIZE = Size(num_layers=8, num_microbatches=16, num_ranks=4)


@pytest.mark.parametrize("imbalance", [1.0, 1.2, 1.66, 2.2])
def test_loads_of_an_imbalance(imbalance: float) -> None:
    loads = with_imbalance(_SIZE, imbalance)
    assert harness_loads.imbalance_of(loads) == pytest.approx(imbalance, abs=0.01)
    for layer in loads:
        for of_ranks in layer:
            assert fmean(of_ranks) == pytest.approx(1)


def test_workloads_differ_in_where_the_imbalance_is() -> None:
    by_name = {name.split()[0]: work for name, work in workloads(_SIZE).items()}
    assert [*by_name] == [f"W{number}" for number in range(8)]
    for work in by_name.values():
        for loads in (work.experts, work.attention):
            for layer in loads:
                assert len(layer) == _SIZE.num_microbatches
                for of_ranks in layer:
                    assert fmean(of_ranks) == pytest.approx(1)
    imbalances = {
        name: round(harness_loads.imbalance_of(work.experts), 2)
        for name, work in by_name.items()
    }
    assert imbalances == {
        "W0": 1, "W1": 2, "W2": 2, "W3": 1, "W4": 1, "W5": 1.33, "W6": 2, "W7": 1.5
    }  # fmt: skip
    work_of_ranks = {}
    for name, work in by_name.items():
        totals = [0.0] * _SIZE.num_ranks
        for layer in work.experts:
            for of_ranks in layer:
                totals = [a + b for a, b in zip(totals, of_ranks, strict=True)]
        work_of_ranks[name] = max(totals) / fmean(totals)
    # A hot rank that rotates leaves all ranks with the same work, one that stays does not.
    assert work_of_ranks["W6"] == pytest.approx(1)
    assert work_of_ranks["W2"] == pytest.approx(2)
    assert work_of_ranks["W1"] < 2


def test_command() -> None:
    printed = run_python(
        str(_ROOT / "benchmarks/expert_imbalance.py"), "--quick"
    ).stdout
    assert "| zb-h1, pairs, 8 waiting |" in printed
    assert printed.rstrip().endswith("simulated.")
