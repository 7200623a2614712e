"""Each row for machines without Transformer Engine, and what upstream does without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.upstream import releases
from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks

_MLA = (
    "attention.mla_have_te",
    "attention.mla_telinear",
    "attention.mla_tecolumnparallellinear",
)
_NEEDED = (releases.installed_release() or (0, 0)) < (0, 17)
"""Whether the rows until 0.17 are needed; later releases do without."""


def _layer() -> Any:
    """Build a transformer layer with multi-latent attention of Megatron's own parts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        rope_type="rope",
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    return build_module(spec, config=config, layer_number=1)


def latent_attention() -> None:
    import torch

    start_parallel()
    layer = _layer()
    core = layer.self_attention.core_attention
    assert core.hidden_size_per_partition == 6 * 4  # the value's width, not the key's
    hidden = torch.randn(5, 2, 32, requires_grad=True)
    mask = torch.triu(torch.ones(1, 1, 5, 5), diagonal=1).bool()
    output, _ = layer(hidden, attention_mask=mask)
    assert output.shape == hidden.shape
    output.sum().backward()
    assert hidden.grad is not None
    with without("attention.head_widths"), pytest.raises(TypeError, match="k_channels"):
        _layer()
    if _NEEDED:
        with without(*_MLA), pytest.raises(TypeError, match="isinstance"):
            _layer()


def head_widths_by_default() -> None:
    """Attention that states no widths is upstream's."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    start_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    plain = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    assert plain.hidden_size_per_partition == 32


def default_spec() -> None:
    from megatron.core.models.bert import bert_layer_specs as specs

    assert specs.bert_layer_with_transformer_engine_spec is specs.bert_layer_local_spec
    with (
        without("bert.te_spec"),
        pytest.raises(ImportError, match="Transformer Engine"),
    ):
        _ = specs.bert_layer_with_transformer_engine_spec


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
    if _NEEDED:
        with (
            without("moe.router_gemm"),
            pytest.raises(NameError, match="te_general_gemm"),
        ):
            router_gating_linear(tokens, weight, None, torch.float32)


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
    with (
        without("norms.sequence_parallel"),
        pytest.raises(AssertionError, match="sequence par"),
    ):
        WrappedTorchNorm(split, 8)


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


def recompute_together() -> None:
    """Checkpoints that share a manager reach it: it discards and restores them as one."""
    import torch
    from megatron.core.tensor_parallel import random

    start_parallel()
    manager = random.CheckpointWithoutOutputManager()
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(torch.sin(torch.tanh(x)).sum(), x)[0]
    made = x
    for function in (torch.tanh, torch.clone):
        made = random.CheckpointWithoutOutput(False, ckpt_manager=manager).checkpoint(
            function, made
        )
    output = torch.sin(made)
    manager.discard_all_outputs_and_register_unified_recompute(output)
    assert made.untyped_storage().size() == 0
    output.sum().backward()
    assert torch.equal(x.grad, expected)
    kept = random.CheckpointWithoutOutput(retain_input_tensors=True)
    alias = kept.checkpoint(lambda tensor: tensor.view_as(tensor), x)
    kept.discard_output_and_register_recompute(alias)
    assert alias.untyped_storage().size()


@pytest.mark.parametrize(
    "case",
    [
        latent_attention,
        head_widths_by_default,
        default_spec,
        router_gemm,
        sequence_parallel,
        recompute,
    ],
)
def test_without_transformer_engine(case: Callable[[], None]) -> None:
    run_ranks(1, case)


def inference_layers() -> None:
    """A layer of multi-token prediction asks whether its projection is one for inference."""
    import torch
    from megatron.core.transformer import multi_token_prediction

    def asks() -> bool:
        return multi_token_prediction.is_inference_column_parallel_linear(
            torch.nn.Linear(1, 1)
        )

    assert not asks()
    with without("mtp.inference_layers"), pytest.raises(TypeError, match="isinstance"):
        asks()


@pytest.mark.skipif(
    (releases.installed_release() or (0, 0)) < (0, 20),
    reason="0.20 has managers of checkpoints, and layers for inference",
)
@pytest.mark.parametrize("case", [recompute_together, inference_layers])
def test_without_transformer_engine_since_0_20(case: Callable[[], None]) -> None:
    run_ranks(1, case)
