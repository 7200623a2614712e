"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks

_MLA = ("attention.mla_have_te", "attention.mla_telinear", "attention.mla_tecolumnparallellinear")


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


@pytest.mark.parametrize("case", [latent_attention, head_widths_by_default])
def test_patch(case) -> None:
    run_ranks(1, case)
