"""Counts the activations that a forward keeps for its backward, by reading its graph.

Hooks for saved tensors would be simpler, but with them a backward sees copies of the parameters,
without the attributes that Megatron sets on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["kept_bytes"]


def kept_bytes(outputs: Iterable[torch.Tensor | None], model: torch.nn.Module) -> int:
    """Return the bytes of all storages that the graph of the outputs keeps, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    for node in _nodes(output.grad_fn for output in outputs if output is not None):
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of a graph once."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        waiting.extend(following)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node keeps: attributes of torch's nodes, a tuple of custom ones."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in names or ["saved_tensors"]:
        value = getattr(node, name, None)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
