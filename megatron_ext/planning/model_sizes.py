"""A model's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["dense", "moe", "mamba", "attention", "mlp", "experts"]
HYBRID_KINDS: dict[str, LayerKind] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "experts",
}
"""Letter in Megatron's hybrid layer pattern -> layer kind."""
# Limits for sizes in flags and files. A model with an absurd number of layers would
# exhaust the memory.
MAX_LAYERS = 1024
MAX_SIZE = 10**8


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes that determine a model's weights, operations and activations."""

    name: str
    hidden: int
    heads: int
    query_groups: int
    head_size: int
    """Width of queries and keys, including the rotary part."""
    value_size: int
    ffn: int
    """Width of the dense feed-forward network."""
    gated: bool
    """Whether the network has two up-projections (SwiGLU) instead of one."""
    vocabulary: int
    """Padded vocabulary size."""
    is_tied: bool
    """Whether the output layer shares the embedding weights."""
    learned_positions: int
    biases: bool
    qkv_biases: bool
    norm_weights: int
    """Number of weight vectors per norm: 1 (RMSNorm) or 2 (LayerNorm)."""
    qk_norm: bool
    window: int
    """Number of keys that a query sees in sliding attention; 0: all earlier keys."""
    window_share: float
    """Share of attention layers that use sliding attention."""
    kinds: tuple[LayerKind, ...]
    """By layer: its kind. `dense` and `moe` layers have attention and a feed-forward network, which
    is a mixture of experts in `moe`. Layers in a hybrid model are `mamba`, `attention`, `mlp` or
    `experts`."""
    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    """Total width of the shared experts; 0 if there are none."""
    expert_hidden: int
    """Input width of the routed experts: `hidden`, or the width of a latent mixture."""
    scan_heads: int
    """Number of heads in a Mamba-2 layer."""
    scan_head_size: int
    scan_state: int
    scan_groups: int
    is_latent: bool
    """Whether attention is multi-latent."""
    query_rank: int
    """Rank of compressed queries; 0 if queries are not compressed."""
    key_value_rank: int
    rotary_size: int
    mtp_layers: int
    sequence: int | None
    """Sequence length in tokens, or None if the source does not contain it."""
    flags: tuple[str, ...]
    """The Megatron flags that describe this model."""

    @property
    def num_layers(self) -> int:
        """Number of layers, excluding those for multi-token prediction."""
        return len(self.kinds)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """By layer: whether it has a mixture of experts."""
        return tuple(kind in ("moe", "experts") for kind in self.kinds)

    @property
    def mtp_kind(self) -> LayerKind:
        """Layer kind in the heads for multi-token prediction."""
        return "moe" if self.moe_layers[-1] else "dense"
