"""How long the samples of a micro-batch are, as far as its data say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["ItemSize", "item_size"]


class ItemSize(NamedTuple):
    """What the cost of a micro-batch follows from."""

    tokens: int
    """All, padding too."""
    pairs: int
    """Pairs of tokens of one sample: the sum of the squares of lengths."""


def item_size(item: Any) -> ItemSize | None:
    """Return the size of a micro-batch; None: it does not say it.

    Args:
        item: What the data iterator gives: `tokens`, `[b, s]` with any s from 0 on, or for packed
            samples `cu_seqlens` as well, `[n]` or `[b, n]`, where each sample begins and the last
            one ends. Entries beyond the last sample may repeat its end.
    """
    if not isinstance(item, Mapping):
        return None
    tokens, bounds = item.get("tokens"), item.get("cu_seqlens")
    if bounds is not None:
        pairs = int(bounds.long().diff(dim=-1).square().sum())
        return ItemSize(int(bounds[..., -1].sum()) if tokens is None else tokens.numel(), pairs)
    if tokens is not None:
        return ItemSize(tokens.numel(), tokens.numel() * int(tokens.shape[-1]))
    return None
