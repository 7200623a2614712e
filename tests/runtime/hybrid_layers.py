"""Layers of a hybrid model for a CPU: Megatron's own, and a recurrence in place of Mamba's kernels.

`--spec` names this module, so it is imported while Megatron builds the model.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

setattr(hybrid_block, "TENorm", WrappedTorchNorm)  # noqa: B010  a rank, which ends with its training


class Recurrence(MegatronModule):
    """A layer in which each token sees the mean of the tokens before it."""

    def __init__(
        self, config: Any, layer_number: int, pg_collection: Any, **_names: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        width, groups = config.hidden_size, {"tp_group": pg_collection.tp}
        settings = {
            "config": config,
            "init_method": config.init_method,
            "skip_bias_add": False,
        }
        self.norm = WrappedTorchNorm(config=config, hidden_size=width)
        self.into = ColumnParallelLinear(
            width, width, bias=False, gather_output=False, **settings, **groups
        )
        self.out = RowParallelLinear(
            width, width, bias=False, input_is_parallel=True, **settings, **groups
        )

    def forward(self, hidden_states: torch.Tensor, **_rest: Any) -> torch.Tensor:
        """Return `[s, b, h]` of the same shape."""
        mixed = self.into(self.norm(hidden_states))[0].cumsum(dim=0)
        counts = torch.arange(1, len(mixed) + 1, device=mixed.device).view(-1, 1, 1)
        return hidden_states + self.out(mixed / counts)[0]


spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=Recurrence),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=SelfAttentionSubmodules(
                        linear_qkv=ColumnParallelLinear,
                        core_attention=DotProductAttention,
                        linear_proj=RowParallelLinear,
                    ),
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=ModuleSpec(
                    module=MLP,
                    submodules=MLPSubmodules(
                        linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                    ),
                ),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    ),
)
