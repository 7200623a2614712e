"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import logging

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks

_LOGGER = "megatron.core.tensor_parallel.random"


def notices(patched: bool) -> list[str]:
    """Draw under a forked state; return what the tracker logs."""
    if not patched:
        with without("tensor_parallel.rng_notice"):
            return _draw()
    return _draw()


def _draw() -> list[str]:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger(_LOGGER).addHandler(Listener())
    start_parallel()
    with get_cuda_rng_tracker().fork():
        torch.rand(2)
    logging.getLogger(_LOGGER).warning("something else")
    return said


@pytest.mark.parametrize(("patched", "count"), [(True, 1), (False, 2)])
def test_only_the_notice_is_dropped(patched: bool, count: int) -> None:
    (said,) = run_ranks(1, notices, patched)
    assert said[-1] == "something else"
    assert len(said) == count


def recompute() -> None:
    """Discard an output, restore it in the backward pass: the gradient is the usual one."""
    import torch
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    start_parallel()
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)

    expected = torch.autograd.grad((torch.tanh(x) @ weight).sum(), weight)[0]
    checkpoint = CheckpointWithoutOutput()
    activation = checkpoint.checkpoint(torch.tanh, x)
    output = activation @ weight
    checkpoint.discard_output_and_register_recompute(output)
    assert activation.untyped_storage().size() == 0
    output.sum().backward()
    assert torch.equal(weight.grad, expected)
    with (
        without("tensor_parallel.recompute_without_fp8"),
        pytest.raises(NameError, match="FP8GlobalStateManager"),
    ):
        CheckpointWithoutOutput().checkpoint(torch.tanh, x)


def test_recomputation_without_transformer_engine() -> None:
    run_ranks(1, recompute)
