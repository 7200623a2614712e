"""Activations that Megatron offloads return for the backwards of a table, whichever its order.

Megatron demands Transformer Engine for it, but only to keep its weights on the device. Here
Megatron's own layers run, on streams that the host or the emulated device has.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_musa.queued import queued
from tests.runtime import capture
from tests.runtime.capture import Captured, run_here
from tests.runtime.test_equality import UNCLIPPED, assert_equal, stock
from tests.runtime.test_recipes import growing

_NORMS = ["attn_norm", "mlp_norm", "qkv_linear"]
_ATTENTION = ["core_attn", "attn_proj"]
FLAGS = f"{capture.GPT}{UNCLIPPED}--num-layers 8 "


def offloading(
    model: str,
    argv: list[str],
    mean_delay_s: float = 0.0,
    modules: Sequence[str] = _NORMS,
) -> Captured:
    """Train as one rank whose activations wait for their backwards on the host."""
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import (
        fine_grained_activation_offload as megatrons,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    transformer_engine.cpu_offload = SimpleNamespace()
    handler, moved = megatrons.ChunkOffloadHandler, []
    if hasattr(handler, "_can_manage_tensor_for_offload"):  # takes those of CUDA
        handler._can_manage_tensor_for_offload = staticmethod(
            lambda tensor: not isinstance(tensor, megatrons.torch.nn.Parameter)
        )
    offload, complete = handler.offload, TransformerConfig.__post_init__

    def moving(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        moved.append(tensor.numel())
        return offload(self, tensor, *args, **kwargs)

    def offloading_too(config: Any) -> None:
        config.fine_grained_activation_offloading = True
        config.offload_modules, config.min_offloaded_tensor_size = modules, 1
        complete(config)

    handler.offload = moving  # this process is a rank and ends
    TransformerConfig.__post_init__ = offloading_too
    found = run_here(model, argv, mean_delay_s)
    assert len(moved) > 8 * len(found.gradients), "little was offloaded"
    return found


def attending(model: str, argv: list[str], mean_delay_s: float = 0.0) -> Captured:
    """Train as one rank whose attention frees its operands behind the forward."""
    return offloading(model, argv, mean_delay_s, _ATTENTION)


SCHEDULES = pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("zb-v", 2),
        ("zb-h1", 2),
        ("dualpipe-v", 2),
        ("interleaved", 2),
        ("1f1b", 2),
        ("bitpipe", 4),
    ],
)


@pytest.mark.short_s(6)
@SCHEDULES
def test_activations_return_in_the_order_of_the_table(
    schedule: str, ranks: int
) -> None:
    """From the second step on they come ahead of their backward."""
    flags = FLAGS + (capture.PP4 if schedule == "bitpipe" else capture.PP2)
    found = capture.train(
        ranks, f"{flags}--pipeline-schedule {schedule} ", run=offloading
    )
    assert found.tables
    assert_equal(found, stock(ranks, FLAGS + capture.PP2))


@SCHEDULES
def test_memory_that_is_freed_behind_a_forward_returns_for_w(
    schedule: str, ranks: int
) -> None:
    """In the first step, in which all is offloaded; later each order keeps other tensors.

    Megatron's own attention has other bits with what was contiguous on the host, so the reference
    offloads too.
    """
    pp = capture.PP4 if schedule == "bitpipe" else capture.PP2
    found = capture.train(
        ranks, f"{FLAGS}{pp}--pipeline-schedule {schedule} ", run=attending
    )
    expected = capture.train(ranks, FLAGS + capture.PP2, run=attending)
    assert found.losses[0] == expected.losses[0]
    assert found.gradients[0] == expected.gradients[0]


def test_another_number_of_microbatches_is_learned_anew() -> None:
    flags = growing(FLAGS) + capture.PP2
    found = capture.train(2, f"{flags}--pipeline-schedule zb-v ", run=offloading)
    assert len(found.tables) == 2
    assert_equal(found, stock(2, flags))


@pytest.mark.short_s(5)
@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize("connections", [8, 1])
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_transfers_behind_the_host(schedule: str, connections: int) -> None:
    """With eight queues Megatron's own schedule reads tensors that have not returned."""
    # Slow copies, so that one to the host is still on its way when a backward fetches it again.
    env = queued(connections=connections, jitter_us=100, copy_us=3000, seed=connections)
    flags = f"{FLAGS}{capture.PP2}"
    ours = f"{flags}--pipeline-schedule {schedule} "
    found = capture.train(2, ours, device="musa", env=env, run=offloading)
    assert_equal(found, stock(2, flags))
