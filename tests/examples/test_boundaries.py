"""Models whose stages send trees and routes: the gradients of one stage, bit for bit."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.pipeline_config import DynamicOrder
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
    from megatron.core import parallel_state

    part = parallel_state.get_tensor_model_parallel_rank()
    torch.distributed.barrier()  # a rank of the tests ends without a farewell
    return losses, {f"{part}.{name}": each.numpy() for name, each in gradients.items()}


def train(ranks: int, model: str, schedule: str | None, **settings: Any) -> Any:
    """Return the losses of each replica, and the gradients of all stages by tensor rank."""
    losses: set[tuple[float, ...]] = set()
    together: dict[str, Any] = {}
    for mine, gradients in run_ranks(ranks, train_here, model, schedule, settings):
        losses.update([tuple(mine)] if mine else [])
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
    different = [
        n for n, gradient in found[1].items() if (gradient != expected[1][n]).any()
    ]
    assert not different, different
    idle = {
        n
        for n, gradient in found[1].items()
        if n.endswith("weight") and not gradient.any()
    }
    assert {name.partition(".")[2] for name in idle} <= {"layers.query0.weight"}, (
        "what has one block to choose from has no gradient"
    )


DYNAMIC = {"dynamic": DynamicOrder(), "seed": 1}


@pytest.mark.parametrize("model", MODELS)
def test_as_in_one_stage(model: str) -> None:
    assert_equal(train(2, model, "zb-v", transport="shm"), alone(model))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("ranks", "schedule", "settings"),
    [
        (4, "1f1b", {"transport": "torch"}),
        (4, "gpipe", {"transport": "shm"}),
        (4, "interleaved", {"transport": "tcp"}),
        (4, "zb-h1", {"transport": "shm"}),
        (4, "v-half", {"transport": "shm"}),
        (4, "dualpipe-v", {"transport": "torch"}),
        (4, "interleaved", DYNAMIC),
        (4, "zb-v", DYNAMIC),
        (8, "interleaved", {"transport": "shm"}),
        (8, "zb-v", {"transport": "tcp"}),
    ],
)
def test_every_schedule(
    model: str, ranks: int, schedule: str, settings: dict[str, Any]
) -> None:
    assert_equal(train(ranks, model, schedule, **settings), alone(model))


TENSOR = {"parallel": {"tensor_model_parallel_size": 2}}
SEQUENCE = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
REPLICAS = {"replicas": 2}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize(
    "beside", [TENSOR, SEQUENCE, REPLICAS], ids=["tensor", "sequence", "replicas"]
)
def test_beside_other_parallelism(
    model: str, schedule: str, beside: dict[str, Any]
) -> None:
    """Two stages on four ranks have the bits of one stage on two."""
    found, expected = (
        train(4, model, schedule, **beside),
        train(2, model, None, **beside),
    )
    assert_equal(found, expected)
    assert len(found[0]) == beside.get("replicas", 1)


@pytest.mark.slow
def test_parts_of_a_layer_are_those_of_the_whole_one() -> None:
    """Tensor-parallel ranks run the same model, up to the order of its sums."""
    [whole], [split] = (
        train(ranks, "hyper-connections", None, steps=1, **beside)[0]
        for ranks, beside in ((1, {}), (2, SEQUENCE))
    )
    assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [4, 8])
def test_bitpipe_sums_over_its_two_pipelines(model: str, ranks: int) -> None:
    """In one step: each further one multiplies what another order of a sum rounds differently."""
    found = train(ranks, model, "bitpipe", steps=1, transport="shm")
    expected = train(1, model, None, steps=1)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        np.testing.assert_allclose(
            gradient, expected[1][name], rtol=1e-5, atol=1e-7, err_msg=name
        )


def _traffic_here(model: str, chunks: int) -> tuple[int, int, int]:
    """Train as one rank; return bytes that it sent, hops of a micro-batch, and bytes of a block."""
    from megatron_ext.runtime.runtime import totals

    train_here(model, "interleaved", {"chunks": chunks, "transport": "shm"})
    import stages  # type: ignore[import-not-found]
    from train import LAYERS, MICROBATCHES, STEPS  # type: ignore[import-not-found]

    hops = 2 * (chunks * torch.distributed.get_world_size() - 1) * MICROBATCHES * STEPS
    return totals()[1], hops * LAYERS, 4 * stages.LENGTH * stages.BATCH * stages.WIDTH


@pytest.mark.slow
def test_routes_send_less_than_half_of_a_padded_wire() -> None:
    """A wire of one shape carries room for all earlier blocks over every hop, there and back."""
    by_rank = run_ranks(8, _traffic_here, "attention-over-blocks", 2)
    _, tensors, num_bytes = by_rank[0]
    sent = sum(own for own, _, _ in by_rank)
    print(f"{sent} bytes of routes, {tensors * num_bytes} of a padded wire")
    assert 2 * sent <= tensors * num_bytes
