"""Bytes that stages hand on, from a trace, under its own schedule and others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.schedules import generate, simulate
from megatron_ext.schedules.table.placement import linear, loop, v
from megatron_ext.tools.trace import forecast
from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tools.trace.forecast import Traffic, measured_traffic
from tests.tools.trace.runs import trace_of, write_run

MESSAGE = 1024
"""Bytes of each message of `write_run`."""


@pytest.mark.parametrize("traced", ["1f1b", "zb-v"])
def test_equal_boundaries_tell_the_bytes_of_every_schedule(tmp_path: Path, traced: str) -> None:
    found = forecast.forecast(write_run(tmp_path, schedule=traced))
    sent = {p.schedule: p.sent_bytes for p in found.predictions}
    for name, options in (
        ("1f1b", {}),
        ("interleaved", {"chunks": 2}),
        ("zb-v", {}),
        ("bitpipe", {}),
    ):
        table = generate(name, 4, 8, **options)  # type: ignore[arg-type]
        assert sent[table.label] == MESSAGE * simulate(table).messages, name
    assert sent["1f1b dpp hint"] == sent["1f1b"]
    line = next(line for line in forecast.table(found).splitlines() if line.startswith("1f1b "))
    assert line.split()[-2] == f"{sent['1f1b'] / 2**20:.4g}"


def test_bytes_on_routes_are_those_of_the_traced_schedule(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    path = trace_of(folder, 0)
    # Of rank 0, what went to the next stage goes on routes.
    path.write_text(path.read_text().replace('"for":"F"', '"for":"P"'))
    found = {p.schedule: p.sent_bytes for p in forecast.forecast(folder).predictions}
    assert found["1f1b"] == found["gpipe"] == MESSAGE * 3 * 2 * 8
    assert found["zb-v chunks=2"] is found["interleaved chunks=2"] is None


TREES = Traffic(linear(4), {0: 100.0, 1: 700.0, 2: 300.0}, 0.0)
"""A model whose boundaries have different sizes."""


def test_boundaries_of_different_sizes_tell_what_has_the_same_stages() -> None:
    assert TREES.under(linear(4)) == 1100
    assert TREES.under(v(2)) == 400, "the second boundary is inside a rank"
    assert TREES.under(loop(2, 2)) == 1100
    assert TREES.under(loop(4, 2)) is None, "other stages, whose boundaries nobody has seen"
    assert Traffic(v(2), {0: 100.0, 2: 300.0}, 0.0).under(linear(4)) is None


def test_replicas_count_once(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    once = measured_traffic(run.surveys, linear(4))
    assert once is not None
    for survey in (again := list(read_run(run.directory).surveys)):
        object.__setattr__(survey.header, "data", 1)
    assert measured_traffic([*run.surveys, *again], linear(4)) == once


def test_a_run_without_messages_tells_nothing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    for survey in run.surveys:
        survey.sent.clear()
    assert measured_traffic(run.surveys, linear(4)) is None
