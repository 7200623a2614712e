"""Disaggregated training is that of one stage after the other on half of the replicas."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.schedules.runtime import capture
from tests.schedules.runtime.capture import GPT, Captured, _merge

FBD = "--forward-backward-disaggregating "


def _values(tensor: Any) -> tuple[float, ...]:
    return tuple(tensor.detach().flatten().tolist())


def run_role(argv: list[str], values: bool = False) -> tuple[str, Captured]:
    """Train as one rank of either role, or of none; keep values instead of digests."""
    from megatron_ext.disaggregation.job import current

    if values:
        setattr(capture, "_digest", _values)  # noqa: B010
    captured = capture.run_here("gpt", argv)
    job = current()
    return (job.role if job else "backward"), captured


def train(num_ranks: int, flags: str, *, values: bool = False) -> tuple[Captured, list[Captured]]:
    """Return what the backward ranks computed together, and the forward ranks one by one."""
    return together(run_ranks(num_ranks, run_role, flags.split(), values, timeout_s=100))


def together(by_rank: list[tuple[str, Captured]]) -> tuple[Captured, list[Captured]]:
    """Return what the backward ranks computed together, and the forward ranks one by one."""
    forward = [captured for role, captured in by_rank if role == "forward"]
    backward = [captured for role, captured in by_rank if role == "backward"]
    whole = Captured(gradients=[{} for _ in backward[0].gradients])
    for rank, captured in enumerate(backward):
        whole.losses = captured.losses if any(captured.losses) else whole.losses
        for mine, theirs in zip(whole.gradients, captured.gradients, strict=True):
            _merge(mine, theirs, rank)
        _merge(whole.parameters, captured.parameters, rank)
    return whole, forward


@cache
def stock(num_ranks: int, flags: str) -> Captured:
    return capture.train(num_ranks, flags)


DROPOUT = GPT.replace("--hidden-dropout 0 --attention-dropout 0", "--microbatch-rng")
BF16 = "--bf16 "
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce "


def sizes(tp: int, pp: int) -> str:
    parallel = "--sequence-parallel " if tp > 1 else ""
    return f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {parallel}"


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "flags"),
    [
        (1, 1, 1, GPT),
        (1, 2, 2, GPT + SHARDED),
        (1, 4, 1, DROPOUT),
        (2, 1, 2, DROPOUT),
        (2, 2, 1, DROPOUT + BF16),
    ],
)
def test_equal_to_half_the_replicas(tp: int, pp: int, dp: int, flags: str) -> None:
    flags += sizes(tp, pp)
    ours, _ = train(2 * tp * pp * dp, flags + FBD)
    assert_equal(ours, stock(tp * pp * dp, flags))


@pytest.mark.parametrize(("tp", "pp", "flags"), [(1, 1, GPT), (2, 2, DROPOUT)])
def test_shipped_activations_give_the_same(tp: int, pp: int, flags: str) -> None:
    flags += sizes(tp, pp) + RECOMPUTE
    ours, _ = train(2 * tp * pp, flags + FBD + "--fbd-activations ship ")
    assert_equal(ours, stock(tp * pp, flags))


def assert_equal(ours: Captured, theirs: Captured) -> None:
    assert ours.losses == theirs.losses
    assert ours.gradients == theirs.gradients
    assert ours.parameters == theirs.parameters


MERGED = FBD + "--ignore-forward-tensor-parallel "
SWIGLU = "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2 "
TOLERANCE = 5e-6
"""Of losses and parameters: sums over the width of a layer are added up in another order."""


@pytest.mark.parametrize(("pp", "flags"), [(2, GPT + SWIGLU)])
def test_merged_forward_ranks_compute_the_same_up_to_rounding(pp: int, flags: str) -> None:
    flags += sizes(2, pp)
    ours, _ = train(3 * pp, flags + MERGED, values=True)
    theirs, _ = train(2 * pp, flags, values=True)
    for mine, stocks in zip(ours.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(stocks, abs=TOLERANCE)
    assert ours.parameters.keys() == theirs.parameters.keys()
    for name, values in theirs.parameters.items():
        assert ours.parameters[name] == pytest.approx(values, abs=TOLERANCE), name
