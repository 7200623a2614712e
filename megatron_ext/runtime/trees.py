"""Trees of tensors between stages, and their wire format.

A tree is a tensor, None, or a tuple, list or dict with string keys of trees. Its tensors travel as
one message of bytes, each aligned to 64 bytes, so the receiver uses them in place. A `TreeForm`
describes structure, shapes and dtypes. It is sent once if all micro-batches share it; otherwise it
travels as a header before each tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron_ext.errors import MessageMismatch, ScheduleError
from megatron_ext.transport.dtypes import plain

__all__ = ["Leaf", "Tree", "TreeForm", "flatten", "joined", "pack", "unpack"]

Tree = Any
"""A tensor, None, or a tuple, list or dict of trees."""

_ALIGNMENT = 64


class Leaf(NamedTuple):
    """Shape, dtype and requires_grad of a tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Size of its data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')} {shape}"


@dataclass(frozen=True)
class TreeForm:
    """The form of a tree: everything but its tensors' data."""

    text: str
    """Skeleton and leaves as JSON."""
    skeleton: Any = field(compare=False)
    """The tree with 0 for each tensor: null, 0, ["tuple", ...], ["list", ...], or
    ["dict", keys, ...]."""
    leaves: tuple[Leaf, ...] = field(compare=False)
    """All tensors, in order."""

    def header(self) -> torch.Tensor:
        """Return the header to send: uint8 on the CPU, `[number of bytes]`."""
        return torch.frombuffer(bytearray(self.text.encode()), dtype=torch.uint8)

    @staticmethod
    def of_header(header: torch.Tensor) -> TreeForm:
        """Parse a header.

        Raises:
            MessageMismatch: The header is corrupt, or another version of this package sent it.
        """
        return _parsed(bytes(header.cpu().numpy()))

    def tree(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """Rebuild the tree from its tensors, given in order."""
        return _grown(self.skeleton, iter(tensors))

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.leaves)) + "]"


@lru_cache(maxsize=1024)  # most micro-batches have the same form
def _parsed(text: bytes) -> TreeForm:
    try:
        skeleton, described = json.loads(text)
        leaves = []
        for shape, name, requires_grad in described:
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"torch.{name} is not a dtype")
            leaves.append(Leaf(tuple(shape), dtype, requires_grad))
        return TreeForm(text.decode(), skeleton, tuple(leaves))
    except (ValueError, TypeError, AttributeError) as error:
        raise MessageMismatch(
            f"a header of {len(text)} bytes cannot be read: {error}; install the same "
            f"megatron_ext for all ranks"
        ) from error


def flatten(
    tree: Tree, what: str, needs_gradient: Callable[[torch.Tensor], bool]
) -> tuple[list[torch.Tensor], TreeForm]:
    """Return a tree's tensors, in order, and its form.

    Args:
        tree: The output of a stage.
        what: Names the tree in error messages.
        needs_gradient: Whether a gradient comes back for a tensor: its leaf requires grad.

    Raises:
        ScheduleError: The tree contains an object of an unsupported type.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _cut(tree, tensors, what)
    leaves = [
        (list(x.shape), str(x.dtype).removeprefix("torch."), needs_gradient(x)) for x in tensors
    ]
    return tensors, _parsed(json.dumps([skeleton, leaves], separators=(",", ":")).encode())


def _cut(tree: Tree, tensors: list[torch.Tensor], what: str) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return 0
    if tree is None:
        return None
    kind = type(tree)
    if kind in (tuple, list):
        return [kind.__name__, *(_cut(each, tensors, what) for each in tree)]
    if kind is dict and all(isinstance(key, str) for key in tree):
        return ["dict", list(tree), *(_cut(each, tensors, what) for each in tree.values())]
    raise ScheduleError(
        f"{what} holds a {kind.__name__}; hand on a tensor, None, or a tuple, list or dict of "
        f"them, whose keys are text"
    )


def _grown(skeleton: Any, tensors: Iterator[torch.Tensor]) -> Tree:
    if skeleton is None:
        return None
    if skeleton == 0:
        return next(tensors)
    kind, *rest = skeleton
    if kind == "dict":
        keys, *values = rest
        return {key: _grown(each, tensors) for key, each in zip(keys, values, strict=True)}
    grown = [_grown(each, tensors) for each in rest]
    return tuple(grown) if kind == "tuple" else grown


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate the bytes of tensors, each aligned to 64 bytes. A single tensor is not copied.

    Args:
        tensors: Of any dtype and shape.
        device: Where to allocate the result.

    Returns:
        uint8, `[number of bytes]`.
    """
    parts = [plain(tensor.detach()).reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(parts) == 1:
        return parts[0]
    # Aligned, so that the receiver can view the bytes as any dtype, in place.
    packed = torch.empty(_end([part.numel() for part in parts]), dtype=torch.uint8, device=device)
    begin = 0
    for part in parts:
        packed[begin : begin + part.numel()].copy_(part)
        begin += _padded(part.numel())
    return packed


def unpack(packed: torch.Tensor, leaves: Sequence[Leaf], what: str) -> list[torch.Tensor]:
    """Return the packed tensors as views into `packed`.

    Args:
        packed: The result of `pack`: uint8, `[number of bytes]`.
        leaves: Shapes and dtypes of the tensors.
        what: Names the tensors in error messages.

    Raises:
        MessageMismatch: The number of bytes does not match the leaves.
    """
    sizes = [leaf.num_bytes for leaf in leaves]
    if packed.dtype != torch.uint8 or packed.numel() != _end(sizes):
        raise MessageMismatch(
            f"{what} has {packed.nbytes} bytes, but its tensors need {_end(sizes)}; declare "
            f'boundary="varies" where shapes change from micro-batch to micro-batch'
        )
    tensors, begin = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        tensors.append(packed[begin : begin + size].view(leaf.dtype).view(leaf.shape))
        begin += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _end(sizes: Sequence[int]) -> int:
    """Return the offset in bytes at which the last part ends."""
    return sum(map(_padded, sizes[:-1])) + sizes[-1] if sizes else 0


# Upstream's `backward_step` starts from one tensor only.
class _Join(torch.autograd.Function):
    """Joins several tensors into one root; their gradients are supplied when the backward runs."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


def joined(tensors: Sequence[torch.Tensor], gradients: list[Any]) -> torch.Tensor:
    """Return a float32 scalar whose backward runs that of several tensors, whose data may be freed.

    Args:
        tensors: At least one tensor; each requires grad.
        gradients: The caller fills it before the backward, one gradient per tensor. None adds no
            gradient, but the tensor's autograd node still runs.
    """
    root: torch.Tensor = _Join.apply(gradients, *tensors)
    return root
