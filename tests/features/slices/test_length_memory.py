"""Slices by length keep what their tables forecast: tensors that autograd saves, counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.features.slices.length_training import Job, Trained, train
from tests.ranks import run_ranks

LONGEST = 2048
SLICE_TOKENS = 256
LENGTHS = (250, 256, 130, 256, 900, LONGEST, 256, 200)
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    # Attention itself then keeps its operands only, which tables do not count by slice.
    "recompute_granularity": "selective",
}


def job_of(schedule: str, pp: int, lengths: tuple[int, ...], **settings: Any) -> Job:
    return Job(
        steps=[[lengths]],
        schedule=schedule,
        pp=pp,
        settings=settings,
        model=WIDE,
        max_positions=LONGEST,
        measures_memory=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_ranks_keep_what_the_table_forecasts(schedule: str) -> None:
    """Within 2 %, in units of the longest micro-batch alone and whole."""
    whole: list[Trained] = run_ranks(2, train, job_of(schedule, 2, (LONGEST,)))
    sliced: list[Trained] = run_ranks(
        2, train, job_of(schedule, 2, LENGTHS, slice_tokens=SLICE_TOKENS)
    )
    for rank, (unit, trained) in enumerate(zip(whole, sliced, strict=True)):
        kept = trained.kept_bytes / (unit.kept_bytes / unit.planned)
        assert kept == pytest.approx(trained.planned, rel=0.02), rank
