"""Megatron's own schedules in the configurations of published hangs, and the same steps here.

The stages are the toys of the contract tests. What stops, and where, is in `docs/hangs.md`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_ext import devices
from tests.fake_musa.queued import queued
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks, start_ranks
from tests.runtime import toy

from .test_published_hangs import start_one_by_one

pytestmark = pytest.mark.usefixtures("emulated_musa")

_MICROBATCHES = 8
_OURS: dict[str, Any] = {"transport": "torch", "message_timeout_s": 30.0}


class Step(NamedTuple):
    """A step of toy stages under upstream's schedule."""

    ranks: int
    chunks: int | None
    """On each rank; None: one, under 1F1B; else interleaved."""
    config: dict[str, Any]


_OVERLAPS = {"overlap_p2p_comm": True, "batch_p2p_comm": False}

_LENGTHS_ON_TWO = Step(2, 2, toy.VARYING)
_LENGTHS_ON_FOUR = Step(4, None, toy.VARYING)


def _run(
    step: Step, ours: str | None = None, one_by_one: bool = False
) -> dict[int, Any]:
    """Run a step as one rank; return the gradients of its stages.

    Args:
        step: What to run.
        ours: The schedule of this project to run; None: upstream's own.
        one_by_one: Start operations one after the other that belong to one batch.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, backend = int(os.environ["RANK"]), devices.current()
    backend.bind(rank)
    device = backend.torch_device(rank)
    toy.start(step.ranks, step.chunks)
    if one_by_one:
        dist.batch_isend_irecv = start_one_by_one  # this process is a rank and ends
    if ours is not None:
        use(make_pipeline(ours, step.ranks, _MICROBATCHES, step.chunks, **_OURS))
    config = toy.config(
        **step.config,
        pipeline_model_parallel_size=step.ranks,
        virtual_pipeline_model_parallel_size=step.chunks,
    )
    stages = [rank + step.ranks * chunk for chunk in range(step.chunks or 1)]
    model = [chunk.to(device) for chunk in toy.chunks(config, stages)]
    get_forward_backward_func()(
        forward_step_func=toy.forward_step,
        data_iterator=[_samples(device) for _ in model],
        model=model,
        num_microbatches=_MICROBATCHES,
        seq_length=toy.LENGTH,
        micro_batch_size=toy.BATCH,
        forward_only=False,
    )
    gradients = {chunk.number: chunk.weight.grad for chunk in model}
    return {
        stage: grad.tolist() for stage, grad in gradients.items() if grad is not None
    }


def _samples(device: torch.device) -> Iterator[torch.Tensor]:
    return (data.to(device) for data in toy.samples(_MICROBATCHES, longer_by=1))


def _together(by_rank: list[dict[int, Any]]) -> dict[int, Any]:
    return {stage: gradient for found in by_rank for stage, gradient in found.items()}


@cache
def _right(ranks: int, chunks: int | None) -> dict[int, Any]:
    """The gradients that upstream's schedule computes on the CPU, in a configuration that ends."""
    settings = toy.VARYING | (_OVERLAPS if chunks else {})
    return _together(run_ranks(ranks, _run, Step(ranks, chunks, settings)))


def _ends_right(
    step: Step, schedule: str, connections: int, one_by_one: bool = False
) -> None:
    env = queued(connections=connections)
    found = run_ranks(
        step.ranks, _run, step, schedule, one_by_one, device="musa", env=env
    )
    gradients = _together(found)
    assert len(gradients) == step.ranks * (step.chunks or 1)
    assert gradients == _right(step.ranks, step.chunks)


@pytest.mark.parametrize("connections", [1, 8])
def test_megatron_1450_hands_gradients_of_another_shape_to_a_backward(
    connections: int,
) -> None:
    """Interleaved on two ranks, lengths vary, no overlap: shapes are swapped on their way."""
    env = queued(connections=connections, stuck_s=2)
    run = start_ranks(2, _run, _LENGTHS_ON_TWO, device="musa", env=env, timeout_s=60)
    assert any(run.exit_codes)
    assert not run.timed_out
    assert any("invalid gradient at index 0" in log for log in run.logs)


@pytest.mark.parametrize("connections", [1, 8])
def test_the_step_of_megatron_1450_ends_right_here(connections: int) -> None:
    _ends_right(_LENGTHS_ON_TWO, "interleaved", connections)


@pytest.mark.parametrize("connections", [1, 8])
def test_megatron_5100_stops_if_operations_are_started_one_by_one(
    connections: int,
) -> None:
    env = queued(connections=connections, stuck_s=2)
    run = start_ranks(
        4, _run, _LENGTHS_ON_FOUR, None, True, device="musa", env=env, timeout_s=60
    )
    assert any(run.exit_codes)
    assert not run.timed_out
    assert "nothing can move any more" in max(run.logs, key=len)


@pytest.mark.parametrize("connections", [1, 8])
def test_the_step_of_megatron_5100_ends_right_here(connections: int) -> None:
    _ends_right(_LENGTHS_ON_FOUR, "1f1b", connections, one_by_one=True)


@pytest.mark.parametrize("connections", [1, 8])
def test_upstreams_own_ends_where_no_report_says_otherwise(connections: int) -> None:
    """1F1B with operations in batches; interleaved with overlap, whose hang is intermittent."""
    env = queued(connections=connections)
    for step in (_LENGTHS_ON_FOUR, Step(4, 2, toy.VARYING | _OVERLAPS)):
        found = _together(run_ranks(4, _run, step, device="musa", env=env))
        assert found == _right(step.ranks, step.chunks)
