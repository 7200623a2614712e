"""Disaggregated training is that of one stage after the other on half of the replicas."""

from __future__ import annotations

from functools import cache

import pytest

from tests.ranks import run_ranks
from tests.schedules.runtime.capture import GPT, Captured, _merge, run_here
from tests.schedules.runtime.capture import train as train_stock

FBD = "--forward-backward-disaggregating "


def run_role(argv: list[str]) -> tuple[str, Captured]:
    """Train as one rank of either role."""
    from megatron_ext.disaggregation.job import current

    captured = run_here("gpt", argv)
    job = current()
    assert job is not None
    return job.role, captured


def train(num_ranks: int, flags: str) -> tuple[Captured, list[Captured]]:
    """Return what the backward ranks computed together, and the forward ranks one by one."""
    by_rank = run_ranks(num_ranks, run_role, flags.split(), timeout_s=100)
    forward = [captured for role, captured in by_rank if role == "forward"]
    backward = [captured for role, captured in by_rank if role == "backward"]
    together = Captured(gradients=[{} for _ in backward[0].gradients])
    for rank, captured in enumerate(backward):
        together.losses = captured.losses if any(captured.losses) else together.losses
        for mine, theirs in zip(together.gradients, captured.gradients, strict=True):
            _merge(mine, theirs, rank)
        _merge(together.parameters, captured.parameters, rank)
    return together, forward


@cache
def stock(num_ranks: int, flags: str) -> Captured:
    return train_stock(num_ranks, flags)


DROPOUT = GPT.replace("--hidden-dropout 0 --attention-dropout 0", "--microbatch-rng")
BF16 = "--bf16 "
SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce "


def sizes(tp: int, pp: int) -> str:
    parallel = "--sequence-parallel " if tp > 1 else ""
    return f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {parallel}"


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "flags"),
    [
        (1, 1, 1, GPT),
        (1, 2, 1, GPT + SHARDED),
        (1, 4, 1, DROPOUT),
        (2, 1, 1, DROPOUT + BF16),
        (1, 1, 2, GPT + SHARDED),
        (2, 2, 1, DROPOUT),
        (1, 2, 2, DROPOUT + BF16),
    ],
)
def test_equal_to_half_the_replicas(tp: int, pp: int, dp: int, flags: str) -> None:
    flags += sizes(tp, pp)
    ours, _ = train(2 * tp * pp * dp, flags + FBD)
    assert_equal(ours, stock(tp * pp * dp, flags))


def assert_equal(ours: Captured, theirs: Captured) -> None:
    assert ours.losses == theirs.losses
    assert ours.gradients == theirs.gradients
    assert ours.parameters == theirs.parameters
