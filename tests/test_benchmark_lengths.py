"""The benchmark of lengths measures what it says; how long things take is not tested here."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.lengths import WAYS, WORKLOADS, Batch
from megatron_ext.features.lengths.length_balance import packs_in_file_order
from tests.commands import run_python

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_batch_fills_its_packs_in_file_order(name: str) -> None:
    workload = WORKLOADS[name]
    packs = workload.packs(16, seed=3)
    assert packs == workload.packs(16, seed=3) != workload.packs(16, seed=4)
    assert len(packs) == 16
    assert list(packs_in_file_order(chain(*packs), workload.max_tokens)) == packs


def test_general_data_are_as_long_as_published() -> None:
    lengths = list(chain(*WORKLOADS["sft"].packs(400, seed=1)))
    assert sum(lengths) / len(lengths) == pytest.approx(846.1, rel=0.05)


def test_attention_at_the_longest_length_costs_as_much_as_the_rest_or_more() -> None:
    assert all(workload.attention >= 1.0 for workload in WORKLOADS.values())


def test_all_ways_do_the_same_work() -> None:
    batch = Batch(
        WORKLOADS["long-64k"], pp=4, num_microbatches=8, num_replicas=2, seed=0
    )
    work = {name: sum(map(sum, batch.rows(way))) for name, way in WAYS.items()}
    assert work == pytest.approx(dict.fromkeys(WAYS, 16.0))
    file, ordered = (
        batch.rows(WAYS[f"interleaved, {how}"]) for how in ("file order", "order")
    )
    assert file != ordered
    assert list(map(sorted, file)) == list(map(sorted, ordered))
    packed = batch.rows(WAYS["interleaved, pack"])
    assert max(map(sum, packed)) < max(map(sum, file))
    assert sorted(chain(*packed)) == sorted(chain(*file)), "the same micro-batches"


def test_command() -> None:
    done = run_python(str(ROOT / "benchmarks/lengths.py"), "--quick")
    assert done.returncode == 0, done.stderr
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()[2:]]
    steps = {name: float(step) for name, step, _ in rows[: len(WAYS) + 1]}
    assert list(steps) == [*WAYS, "bound"]
    assert all(steps["bound"] <= step for step in steps.values())


def test_a_size_that_is_none_is_refused() -> None:
    done = run_python(str(ROOT / "benchmarks/lengths.py"), "--size", "4")
    assert done.returncode == 2
    assert "'4' is not a size such as 4x16" in done.stderr
