"""The sizes of a model, from which its weights, operations and activations follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["dense", "moe", "mamba", "attention", "mlp", "experts"]
HYBRID_KINDS: dict[str, LayerKind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
"""By the letters of Megatron's pattern of a hybrid model."""
MAX_LAYERS = 1024
MAX_SIZE = 10**8


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes from which the weights, operations and activations of a model follow."""

    name: str
    hidden: int
    heads: int
    query_groups: int
    head_size: int
    """Of queries and keys, rotary part included."""
    value_size: int
    ffn: int
    """Width of the dense feed-forward network."""
    gated: bool
    """SwiGLU: two projections up, one down."""
    vocabulary: int
    """Padded."""
    is_tied: bool
    """Whether the output layer shares the embedding's weights."""
    learned_positions: int
    biases: bool
    qkv_biases: bool
    norm_weights: int
    """Vectors of a norm: 1 (RMSNorm) or 2 (LayerNorm)."""
    qk_norm: bool
    window: int
    """Keys that a query of a layer with sliding attention sees; 0: all before it."""
    window_share: float
    """Share of the attentions that slide."""
    kinds: tuple[LayerKind, ...]
    """Of each layer: `dense` and `moe` are attention and a feed-forward network, the latter's a
    mixture of experts; a layer of a hybrid model is `mamba`, `attention`, `mlp` or `experts`."""
    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    """Of the shared experts together; 0: none."""
    expert_hidden: int
    """Width of what routed experts get: `hidden`, or that of a latent mixture."""
    scan_heads: int
    """Of a Mamba-2 layer."""
    scan_head_size: int
    scan_state: int
    scan_groups: int
    is_latent: bool
    """Multi-latent attention."""
    query_rank: int
    """0: queries are not compressed."""
    key_value_rank: int
    rotary_size: int
    mtp_layers: int
    sequence: int | None
    """Length in tokens, if the source gives one."""
    flags: tuple[str, ...]
    """Megatron's flags of this model."""

    @property
    def num_layers(self) -> int:
        """Layers, without those of multi-token prediction."""
        return len(self.kinds)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Of each layer: whether it has a mixture of experts."""
        return tuple(kind in ("moe", "experts") for kind in self.kinds)

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of the layer in a head of multi-token prediction."""
        return "moe" if self.moe_layers[-1] else "dense"
