"""Counts the activations that a forward keeps for its backward, by reading its graph.

Hooks for saved tensors would be simpler, but with them a backward sees copies of the parameters,
without the attributes that Megatron sets on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def kept_bytes(outputs: Iterable[torch.Tensor | None], model: torch.nn.Module) -> int:
    """Return the bytes of all storages that the graph of the outputs keeps, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    roots = (output.grad_fn for output in outputs if output is not None)
    waiting: list[Any] = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        # Torch's nodes have an attribute for each tensor that they keep, custom ones a tuple.
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for name in names or ["saved_tensors"]:
            value = getattr(node, name, None)
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in weights:
                        found[storage.data_ptr()] = storage.nbytes()
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        waiting.extend(following)
    return sum(found.values())
