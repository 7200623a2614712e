"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import pytest

from tests.patches.single import without
from tests.ranks import run_ranks


def router_gemm() -> None:
    import torch
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    tokens = torch.randn(4, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    logits = router_gating_linear(tokens, weight, None, torch.float32)
    assert torch.equal(logits, tokens.float() @ weight.float().t())
    logits.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    with without("moe.router_gemm"), pytest.raises(NameError, match="te_general_gemm"):
        router_gating_linear(tokens, weight, None, torch.float32)


def tensor_to_host() -> None:
    import numpy as np
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    splits = torch.tensor([2, 3])
    for move in (moe_utils.maybe_move_tensor_to_cpu, token_dispatcher.maybe_move_tensor_to_cpu):
        moved = move(splits, as_numpy=True)
        assert isinstance(moved, np.ndarray)
        assert moved.tolist() == [2, 3]
        assert isinstance(move(splits.float().requires_grad_(), as_numpy=True), np.ndarray)
        assert torch.equal(move(splits, record_stream=True), splits)
        assert move(None, as_numpy=True) is None
    with without("moe.tensor_to_host"):
        assert moe_utils.maybe_move_tensor_to_cpu(splits, as_numpy=True) is splits


@pytest.mark.parametrize("case", [router_gemm, tensor_to_host])
def test_patch(case) -> None:
    run_ranks(1, case)
