"""Warns about a program's hooks that do not run in pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_ext.config.active import report_departure

if TYPE_CHECKING:
    import torch

# A schedule plan calls these modules' parts, but never the modules themselves.
_RUN_IN_PARTS = (TransformerBlock, TransformerLayer, MoELayer)


def log_skipped_hooks(chunks: Sequence[torch.nn.Module]) -> None:
    """Log the modules whose hooks do not run because plans call only the modules' parts."""
    names = list(_modules_with_skipped_hooks(chunks))
    if names:
        report_departure(
            f"hooks on {', '.join(names)} do not run: with --overlap-moe-expert-parallel-comm, "
            "Megatron runs these modules' parts one by one; register the hooks on the parts "
            "(self_attention, router, experts), or remove the flag"
        )


def _modules_with_skipped_hooks(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in map(unwrap_model, chunks):
        for path, module in chunk.named_modules():
            # The model itself is not called either: its forward step only builds a
            # plan.
            if module is not chunk and not isinstance(module, _RUN_IN_PARTS):
                continue
            hooks = chain(
                module._forward_pre_hooks.values(),
                module._forward_hooks.values(),
                module._backward_pre_hooks.values(),
                module._backward_hooks.values(),
            )
            # Megatron's DDP registers hooks on all modules.
            if any(
                not getattr(hook, "__module__", "").startswith("megatron")
                for hook in hooks
            ):
                yield path or type(module).__name__
