"""Models whose stages hand on trees and routes: the gradients of one stage, bit for bit."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "boundaries"
MODELS = (
    "hyper-connections",
    "attention-over-blocks",
    "vision-language",
    "encoder-decoder",
    "loss-alone",
)


def train_here(model: str, schedule: str | None, settings: dict[str, Any]) -> Any:
    """Run the example as one rank."""
    import os

    os.environ.setdefault("WORLD_SIZE", "1")
    sys.path.insert(0, str(EXAMPLE))
    from train import train  # type: ignore[import-not-found]

    losses, gradients = train(model, schedule, **settings)
    torch.distributed.barrier()  # a rank of the tests ends without a farewell
    return losses, {name: gradient.numpy() for name, gradient in gradients.items()}


def train(ranks: int, model: str, schedule: str | None, **settings: Any) -> Any:
    """Train on some ranks; return losses and the gradients of all stages."""
    losses: list[float] = []
    together: dict[str, Any] = {}
    for mine, gradients in run_ranks(ranks, train_here, model, schedule, settings):
        losses = mine or losses
        for name, gradient in gradients.items():
            assert (together.setdefault(name, gradient) == gradient).all(), name
    return losses, together


@cache
def alone(model: str) -> Any:
    """Train in one stage, by upstream's own loop."""
    return train(1, model, None)


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    different = [n for n, gradient in found[1].items() if (gradient != expected[1][n]).any()]
    assert not different, different
    idle = [n for n, gradient in found[1].items() if n.endswith("weight") and not gradient.any()]
    assert set(idle) <= {"layers.query0.weight"}, (
        "what has one block to choose from has no gradient"
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_as_in_one_stage(model: str, schedule: str) -> None:
    assert_equal(train(2, model, schedule, transport="shm"), alone(model))
