"""Random trees and routes under random schedules, orders and wires: the bits of one process."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext import devices
from megatron_ext.config.active import clear_configuration
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.schedules.search.policies import POLICIES
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.runtime import toy

from .random_stages import RandomStage, alone

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "gpipe", "dualpipe-v")
TWINS = ("bitpipe", "dualpipe")
STEPS = 5
"""Of each model; one is an evaluation, and forms are agreed after the first."""


def _random_steps(
    first: int, number: int, schedules: Sequence[str] = SCHEDULES, **settings: Any
) -> int:
    """Run random models; return how many gradients of weights were compared."""
    device = devices.current().torch_device(int(os.environ["RANK"]))
    devices.current().bind(int(os.environ["RANK"]))
    toy.start(int(os.environ["WORLD_SIZE"]) // (1 + (schedules == TWINS)))
    checked = 0
    for seed in range(first, first + number):
        pipeline = _random_pipeline(random.Random(seed), schedules, settings)
        use(pipeline, seed=1)
        placement = pipeline.placement
        config = toy.config()
        chunks = [
            RandomStage(config, seed, stage, placement.num_stages, device)
            for stage in placement.stages_of[dist.get_rank() // placement.twins]
        ]
        m = pipeline.num_microbatches
        expected = alone(seed, placement.num_stages, m)
        for step in range(STEPS):
            megatron_ext.begin_iteration(step)
            what = f"seed {seed}, step {step}: {pipeline.name} {pipeline.config}, m {m}"
            if step == 2:
                with torch.no_grad():
                    _check(chunks, _step(chunks, m, forward_only=True), expected, what)
                continue
            for chunk in chunks:
                chunk.zero_grad()
            losses = _step(chunks, m)
            checked += _check(chunks, losses, expected, what)
        dist.barrier()
        clear_configuration()
    return checked


def _random_pipeline(
    draw: random.Random, schedules: Sequence[str], given: dict[str, Any]
) -> Pipeline:
    pp = dist.get_world_size()
    name, m = draw.choice(schedules), 2 * pp * draw.randint(1, 2)
    settings: dict[str, Any] = {"transport": draw.choice(("shm", "tcp", "torch"))}
    if draw.random() < 0.4:
        dynamic = DynamicOrder(policy=draw.choice(list(POLICIES)))
        settings = {"dynamic": dynamic, "transport": draw.choice(("shm", "tcp"))}
    return make_pipeline(name, pp, m, message_timeout_s=60.0, **(given or settings))


def _step(chunks: list[RandomStage], m: int, **keywords: Any) -> list[float]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: list[float] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(range(m)) for _ in chunks],
        model=chunks,
        num_microbatches=m,
        seq_length=1,
        micro_batch_size=1,
        **keywords,
    )
    return losses


def _forward_step(microbatches: Any, stage: RandomStage) -> Any:
    made = stage(next(microbatches))
    return made, lambda loss: (loss, loss.item())


def _check(
    chunks: list[RandomStage], losses: list[float], expected: Any, what: str
) -> int:
    checked = 0
    for chunk in chunks:
        if chunk.number == chunk.num_stages - 1:
            assert losses == expected[0], what
        for weight, gradient in zip(
            chunk.weights, expected[1][chunk.number], strict=True
        ):
            if weight.grad is None and gradient is None:
                continue
            # An output that nobody uses gets a gradient of zeros.
            zeros = torch.zeros(weight.shape)
            found, wanted = (
                zeros if g is None else g.cpu() for g in (weight.grad, gradient)
            )
            assert torch.equal(found, wanted), f"{what}, stage {chunk.number}"
            checked += bool(wanted.any())
    return checked


@pytest.mark.parametrize(
    ("ranks", "first", "number"),
    [
        (2, 0, 50),
        (4, 0, 50),
        *(
            pytest.param(4, first, 200, marks=pytest.mark.slow)
            for first in range(0, 1800, 200)
        ),
        *(
            pytest.param(8, first, 50, marks=pytest.mark.slow)
            for first in range(0, 200, 50)
        ),
    ],
)
@pytest.mark.timeout(580)  # hundreds of models, beside other tests
def test_bits_of_one_process(ranks: int, first: int, number: int) -> None:
    for checked in run_ranks(ranks, _random_steps, first, number, timeout_s=560):
        assert checked > number


def test_mirrored_pipelines() -> None:
    """Both read the same micro-batches, whose stages are partly on the twin."""
    for checked in run_ranks(4, _random_steps, 0, 16, TWINS, timeout_s=200):
        assert checked > 16


@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize("path", ["staged", "ipc"])
def test_on_a_device(path: str) -> None:
    settings = {"transport": "shm", "device_path": path}
    for checked in run_ranks(2, _device_steps, settings, device="musa", timeout_s=200):
        assert checked > 8


def _device_steps(settings: dict[str, Any]) -> int:
    return _random_steps(0, 8, **settings)
