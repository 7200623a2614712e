"""What stages hand on where it is more than one tensor: trees, and their way over a wire.

A tree is a tensor, None, or a tuple, list or dict (with text for keys) of trees. Its tensors travel
as the bytes of one message, each at a multiple of 64 bytes, so that the receiver uses them where
they are. Its `Form` says how to read them: it is agreed once where all micro-batches have the same,
and travels as a header where they do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
    """What a tensor of a tree looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Length of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')} {shape}"


@dataclass(frozen=True)
class TreeForm:
    """A tree without the values of its tensors."""

    text: str
    """All of it, as JSON."""
    skeleton: Any = field(compare=False)
    """The tree with a 0 for each tensor: null, 0, ["tuple", ...], ["list", ...], or
    ["dict", keys, ...]."""
    leaves: tuple[Leaf, ...] = field(compare=False)
    """Its tensors, in order."""

    def header(self) -> torch.Tensor:
        """Return what travels, uint8 on the CPU."""
        return torch.frombuffer(bytearray(self.text.encode()), dtype=torch.uint8)

    @staticmethod
    def of_header(header: torch.Tensor) -> TreeForm:
        """Return what a header says.

        Raises:
            MessageMismatch: It is damaged, or of another version of this package.
        """
        return _parsed(bytes(header.cpu().numpy()))

    def tree(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """Return the tree with its tensors, in order."""
        return _grown(self.skeleton, iter(tensors))

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.leaves)) + "]"


@lru_cache(maxsize=1024)
def _parsed(text: bytes) -> TreeForm:
    try:
        skeleton, leaves = json.loads(text)
        return TreeForm(text.decode(), skeleton, tuple(_leaf(*each) for each in leaves))
    except (ValueError, TypeError, AttributeError) as error:
        raise MessageMismatch(
            f"a header of {len(text)} bytes says nothing: {error}; install the same megatron_ext "
            f"for all ranks"
        ) from error


def _leaf(shape: list[int], dtype: str, requires_grad: bool) -> Leaf:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype} is no dtype")
    return Leaf(tuple(shape), found, requires_grad)


def flatten(tree: Tree, what: str, *, gradients: bool) -> tuple[list[torch.Tensor], TreeForm]:
    """Return the tensors of a tree, in order, and its form.

    Args:
        tree: What a stage hands on.
        what: Says so in an error message.
        gradients: Whether a backward follows; otherwise no tensor requires a gradient.

    Raises:
        ScheduleError: There is something else in the tree.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _cut(tree, tensors, what)
    leaves = [
        (list(x.shape), str(x.dtype).removeprefix("torch."), gradients and x.requires_grad)
        for x in tensors
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
        f"{what} holds a {kind.__name__}; a stage may hand on a tensor, None, or a tuple, list or "
        f"dict with text for keys of them"
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
    """Return the bytes of tensors as one, uint8; that of a single one are not copied.

    Args:
        tensors: Of any dtype and shape.
        device: Where the result is made.
    """
    parts = [plain(tensor.detach()).reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(parts) == 1:
        return parts[0]
    packed = torch.empty(_end([part.numel() for part in parts]), dtype=torch.uint8, device=device)
    begin = 0
    for part in parts:
        packed[begin : begin + part.numel()].copy_(part)
        begin += _padded(part.numel())
    return packed


def unpack(packed: torch.Tensor, leaves: Sequence[Leaf], what: str) -> list[torch.Tensor]:
    """Return the tensors that were packed, on the memory of the packed one.

    Args:
        packed: Of `pack`.
        leaves: What they look like.
        what: Says whose they are in an error message.

    Raises:
        MessageMismatch: The bytes are not those of such tensors.
    """
    sizes = [leaf.num_bytes for leaf in leaves]
    if packed.dtype != torch.uint8 or packed.numel() != _end(sizes):
        raise MessageMismatch(
            f"{what} has {packed.nbytes} bytes, its tensors need {_end(sizes)}; boundaries whose "
            f'shapes change from micro-batch to micro-batch are declared with boundary="varies"'
        )
    tensors, begin = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        tensors.append(packed[begin : begin + size].view(leaf.dtype).view(leaf.shape))
        begin += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _end(sizes: Sequence[int]) -> int:
    """Where the last of some parts ends."""
    return sum(map(_padded, sizes[:-1])) + sizes[-1] if sizes else 0


class _Join(torch.autograd.Function):
    """One root for the backward of several tensors, whose gradients are known when it runs."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


def joined(tensors: Sequence[torch.Tensor], gradients: list[Any]) -> torch.Tensor:
    """Return a scalar whose backward is that of several tensors together.

    Upstream's `backward_step` starts from one tensor only. The values of the tensors may be freed.

    Args:
        tensors: Each requires a gradient; one at least.
        gradients: Filled before the backward with one for each tensor; None: nothing comes from
            here, but the node of the tensor runs.
    """
    root: torch.Tensor = _Join.apply(gradients, *tensors)
    return root
