"""Random trees and routes under random schedules, orders and wires: the bits of one process."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.config.active import clear_configuration
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.schedules.search.policies import POLICIES
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks

from . import toy
from .random_stages import RandomStage, alone

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "gpipe", "dualpipe-v")


def _random_steps(first: int, number: int) -> int:
    """Run random steps; return how many gradients of weights were compared."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    pp, checked = int(os.environ["WORLD_SIZE"]), 0
    toy.start(pp)
    for seed in range(first, first + number):
        draw = random.Random(seed)
        name, wire = draw.choice(SCHEDULES), draw.choice(("shm", "tcp", "torch"))
        m, varies = 2 * pp * draw.randint(1, 2), draw.random() < 0.5
        settings: dict[str, Any] = {"transport": wire}
        if draw.random() < 0.4:
            policy = draw.choice(list(POLICIES))
            settings = {
                "dynamic": DynamicOrder(policy=policy),
                "transport": draw.choice(("shm", "tcp")),
            }
        pipeline = make_pipeline(name, pp, m, message_timeout_s=60.0, **settings)
        use(pipeline, seed=1)
        placement = pipeline.placement
        own, config = placement.stages_of[dist.get_rank()], toy.config()
        chunks = [
            RandomStage(config, seed, stage, placement.num_stages, varies=varies) for stage in own
        ]
        for step in range(2):  # the second with forms that are agreed
            megatron_ext.begin_iteration(step)
            for chunk in chunks:
                chunk.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=[iter(range(m)) for _ in chunks],
                model=chunks,
                num_microbatches=m,
                seq_length=1,
                micro_batch_size=1,
            )
            expected, gradients = alone(seed, placement.num_stages, m, varies=varies)
            what = f"seed {seed}, step {step}: {name} {settings} m {m} varies {varies}"
            if placement.num_stages - 1 in own:
                assert losses == expected, what
            for stage, chunk in zip(own, chunks, strict=True):
                for weight, gradient in zip(chunk.weights, gradients[stage], strict=True):
                    if weight.grad is None and gradient is None:
                        continue
                    # What is handed on and not used gets a gradient of zeros.
                    zeros = torch.zeros_like(weight)
                    found, wanted = (zeros if g is None else g for g in (weight.grad, gradient))
                    assert torch.equal(found, wanted), f"{what}, stage {stage}"
                    checked += bool(wanted.any())
        dist.barrier()
        clear_configuration()
    return checked


def _forward_step(microbatches: Any, stage: RandomStage) -> Any:
    made = stage(next(microbatches))
    return made, lambda loss: (loss, loss.item())


@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_of_one_process(ranks: int) -> None:
    for checked in run_ranks(ranks, _random_steps, 0, 12, timeout_s=300):
        assert checked > 20
