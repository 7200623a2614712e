"""Compares two ways to give a slice the keys and values of its sample's earlier slices.

Both run without attention here, with the gradients of a sum over everything that attention reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.features.slices.sliced_compute import KeptState
from megatron_ext.schedules.table.slices import shares_of_equal_cost, token_bounds
from megatron_ext.text_table import aligned

_HEADS, _WIDTH = 4, 64
_ATTENTION = 0.3
"""Attention's share of the sample's cost, which determines where the sample is cut."""
_NUM_RATIOS = 9
_WRITING = ("cat", "clone", "copy_", "add", "add_", "new_zeros")


class _Appended(torch.autograd.Function):
    """Appends a slice to a copy of all earlier ones, each of which has its own memory."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        slices: dict[int, torch.Tensor],
        gradients: dict[int, torch.Tensor],
        number: int,
    ) -> torch.Tensor:
        slices[number] = tensor.detach().contiguous()
        ctx.slices, ctx.gradients, ctx.number = slices, gradients, number
        return torch.cat([slices[earlier] for earlier in range(number + 1)])

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        lengths = [len(ctx.slices[number]) for number in range(ctx.number + 1)]
        *earlier_gradients, gradient = gradients[0].split(lengths)
        for number, earlier_gradient in enumerate(earlier_gradients):
            if number in ctx.gradients:
                ctx.gradients[number] += earlier_gradient
            else:
                ctx.gradients[number] = earlier_gradient.clone()
        del ctx.slices[ctx.number]
        if ctx.number in ctx.gradients:
            gradient = gradient + ctx.gradients.pop(ctx.number)
        return gradient, None, None, None


class _Written(TorchDispatchMode):
    """Counts the bytes that copies and sums write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in _WRITING:
            self.num_bytes += result.nbytes
        return result


class _Figures(NamedTuple):
    written_bytes: int
    kept_bytes: int
    """Size of the storages that all slices' reads keep for their backwards."""


Way = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Runs the forwards of a sample's slices, `[s, b, heads, width]` each, and returns what each slice
reads."""


def _append(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    slices: dict[int, torch.Tensor] = {}
    gradients: dict[int, torch.Tensor] = {}
    reads = []
    for number, part in enumerate(parts):
        reads.append(_Appended.apply(part, slices, gradients, number))
    return reads


def _buffer(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    layer = torch.nn.Identity()
    state = KeptState()
    bounds = [0, *accumulate(map(len, parts))]
    reads = []
    for number, part in enumerate(parts):
        value = part[..., :0]  # keys are enough
        with state.of(0, 0, number, bounds, backward=False):
            assert state.running is not None
            key, _ = state.running.with_earlier(layer, part, value)
        reads.append(key)
    return reads


def _run(way: Way, parts: Sequence[torch.Tensor], incoming: torch.Tensor) -> float:
    """Run forwards in order and backwards in reverse order, and return the seconds taken."""
    for part in parts:
        part.grad = None
    begin_s = perf_counter()
    reads = way(parts)
    while reads:
        read = reads.pop()
        read.backward(incoming[: len(read)])
    return perf_counter() - begin_s


def _figures(
    way: Way, parts: Sequence[torch.Tensor], incoming: torch.Tensor
) -> _Figures:
    reads = way(parts)
    storages = {
        read.untyped_storage().data_ptr(): read.untyped_storage() for read in reads
    }
    kept_bytes = sum(storage.nbytes() for storage in storages.values())
    del reads, storages
    with _Written() as written:
        _run(way, parts, incoming)
    return _Figures(written.num_bytes, kept_bytes)


def compare_ways(length: int, numbers_of_slices: Sequence[int]) -> str:
    """Return a table that compares both ways for a sample with that many tokens."""
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(length, 1, _HEADS, _WIDTH, generator=generator)
    incoming = torch.randn(length, 1, _HEADS, _WIDTH, generator=generator)
    rows = [
        [
            "slices",
            "written, buffer",
            "appended",
            "kept, buffer",
            "appended",
            "time ratio",
        ]
    ]
    for num_slices in numbers_of_slices:
        bounds = token_bounds(shares_of_equal_cost(num_slices, _ATTENTION), length)
        parts = [
            sample[begin:end].clone().requires_grad_()
            for begin, end in pairwise(bounds)
        ]
        gradients = []
        for way in (_buffer, _append):
            _run(way, parts, incoming)
            gradients.append(
                torch.cat([part.grad for part in parts if part.grad is not None])
            )
        assert gradients[0].equal(gradients[1])
        ratios = []
        for _ in range(_NUM_RATIOS):
            buffer_s = _run(_buffer, parts, incoming)
            ratios.append(buffer_s / _run(_append, parts, incoming))
        row = [str(num_slices)]
        figures = [_figures(way, parts, incoming) for way in (_buffer, _append)]
        row += [f"{figure.written_bytes / sample.nbytes:.1f}" for figure in figures]
        row += [f"{figure.kept_bytes / sample.nbytes:.1f}" for figure in figures]
        rows.append([*row, f"{median(ratios):.2f}"])
    return f"keys of one sample with {length} tokens, in units of their size\n\n{aligned(rows)}"
