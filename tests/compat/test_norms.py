"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import pytest

from tests.patches.single import without
from tests.ranks import run_ranks


def sequence_parallel() -> None:
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def config(**changes: object) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            **{"sequence_parallel": True, "persist_layer_norm": False, **changes},
        )

    split = config()
    norm = WrappedTorchNorm(split, 8, eps=1e-6)
    assert isinstance(norm, torch.nn.LayerNorm)
    assert norm.eps == 1e-6
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert split.sequence_parallel
    by_name = WrappedTorchNorm(config=config(normalization="RMSNorm"), hidden_size=8)
    assert isinstance(by_name, torch.nn.RMSNorm)
    assert by_name.weight.sequence_parallel

    whole = WrappedTorchNorm(config(sequence_parallel=False), 8)
    assert not hasattr(whole.weight, "sequence_parallel")
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        WrappedTorchNorm(config(layernorm_zero_centered_gamma=True), 8)
    with without("norms.sequence_parallel"), pytest.raises(AssertionError, match="sequence par"):
        WrappedTorchNorm(split, 8)


def test_sequence_parallel() -> None:
    run_ranks(1, sequence_parallel)
