"""The simulation of experts with unequal loads: what fills waits, and what bounds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.expert_imbalance import (
    Loads,
    Simulation,
    busiest,
    imbalance_of,
    loads_of,
    sigma_for,
)
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


def test_command() -> None:
    printed = run_python(
        str(_ROOT / "benchmarks/expert_imbalance.py"), "--quick"
    ).stdout
    assert "| zb-h1, pairs, 8 waiting |" in printed
    assert printed.rstrip().endswith("simulated.")
