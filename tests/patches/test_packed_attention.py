"""Attention over packed sequences without Transformer Engine: that of a block-diagonal mask."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.patches.without_te import sequences
from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks


def _packed(sums: list[int], starts: list[int] | None = None, kind: str = "thd") -> Any:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    def tensor(values: list[int] | None) -> Any:
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    return PackedSeqParams(
        qkv_format=kind,
        cu_seqlens_q=tensor(sums),
        cu_seqlens_kv=tensor(sums),
        cu_seqlens_q_padded=tensor(starts),
        cu_seqlens_kv_padded=tensor(starts),
    )


def _attention(groups: int = 2) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=groups,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    return DotProductAttention(config, 1, AttnMaskType.causal, "self")


def block_diagonal() -> None:
    """Compare with one batch under the mask that the sequences mean, and with each one alone."""
    import torch

    start_parallel()
    attention, generator = _attention(), torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(11, heads, 4, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    spans = [(0, 3), (3, 4), (4, 9)]
    made = attention(
        query, key, value, None, packed_seq_params=_packed([0, 3, 4, 4, 9])
    )
    assert made.shape == (11, 16)
    assert not made[9:].any(), "padding behind the last sequence"
    made.square().sum().backward()
    found = [x.grad.clone() for x in (query, key, value)]
    number = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4])
    mask = (number[:, None] != number[None]) | torch.ones(11, 11).triu(1).bool()
    whole = attention(
        *(x.unsqueeze(1) for x in (query, key, value)), mask[None, None]
    ).squeeze(1)
    torch.testing.assert_close(made[:9], whole[:9])
    for begin, end in spans:
        own = [
            x.detach()[begin:end, None].requires_grad_() for x in (query, key, value)
        ]
        alone = attention(*own, None)
        assert torch.equal(made[begin:end], alone.squeeze(1))
        alone.square().sum().backward()
        for x, gradient in zip(own, found, strict=True):
            assert torch.equal(gradient[begin:end], x.grad.squeeze(1))
    with (
        without("attention.packed"),
        pytest.raises(AssertionError, match="Packed sequence"),
    ):
        attention(query, key, value, None, packed_seq_params=_packed([0, 11]))


def padding_between() -> None:
    """Each sequence lies at its start, and what pads it stays zero."""
    import torch

    start_parallel()
    attention = _attention(4)
    query = torch.randn(8, 4, 4)
    packed = _packed([0, 3, 5], [0, 4, 8])
    made = attention(query, query, query, None, packed_seq_params=packed)
    for begin, end in ((0, 3), (4, 6)):
        alone = attention(*[query[begin:end, None]] * 3, None)
        assert torch.equal(made[begin:end], alone.squeeze(1))
    assert not made[3].any()
    assert not made[6:].any()
    with pytest.raises(UserError, match="qkv_format 'bshd' requires"):
        attention(
            query, query, query, None, packed_seq_params=_packed([0, 8], kind="bshd")
        )
    with pytest.raises(
        UserError, match=r"cu_seqlens_kv .* does not fit a packed batch of 4"
    ):
        attention(query, query[:4], query[:4], None, packed_seq_params=_packed([0, 8]))


@pytest.mark.parametrize("check", [block_diagonal, padding_between])
def test_without_transformer_engine(check: Any) -> None:
    run_ranks(1, check)


@pytest.mark.parametrize(
    ("sums", "starts", "found"),
    [
        ([0, 4], None, [(0, 4)]),
        ([0, 2, 2, 5], None, [(0, 2), (2, 5)]),
        ([0, 2, 5], [0, 4, 8], [(0, 2), (4, 7)]),
        ([0], None, []),
    ],
)
def test_where_sequences_lie(
    sums: list[int], starts: list[int] | None, found: list[tuple[int, int]]
) -> None:
    assert list(sequences(_packed(sums, starts), 8)) == found


@pytest.mark.parametrize(
    ("sums", "starts"),
    [([0, 9], None), ([0, 5, 3], None), ([0, 4, 8], [0, 2, 8]), ([0, 2], [0])],
)
def test_sums_that_fit_no_batch(sums: list[int], starts: list[int] | None) -> None:
    with pytest.raises(UserError, match="does not fit a packed batch of 8 tokens"):
        list(sequences(_packed(sums, starts), 8))
