"""Compares ways to give a slice the keys and values of earlier slices of its sample.

Both ways run here without attention, whose gradients are those of a sum over all that it reads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.features.slices.sliced_compute import KeptState
from megatron_ext.schedules.table.slices import shares_of_equal_cost, token_bounds
from megatron_ext.tools.text_table import aligned

_HEADS, _WIDTH = 4, 64
_ATTENTION = 0.3
"""Share of attention in the cost of the sample, which decides where it is cut."""
_PAIRS = 9
_WRITING = ("cat", "clone", "copy_", "add", "add_", "new_zeros")


class _Appended(torch.autograd.Function):
    """Appends a slice to a copy of all earlier ones, as long as each has memory of its own."""

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
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
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
    """Storages that the reads of all slices keep for their backwards."""


Way = Callable[[torch.Tensor, Sequence[int]], list[torch.Tensor]]
"""Runs the forwards of a sample's slices, which end at the bounds: by slice, what it reads."""


def _append(sample: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
    slices: dict[int, torch.Tensor] = {}
    gradients: dict[int, torch.Tensor] = {}
    reads = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        reads.append(_Appended.apply(sample[begin:end], slices, gradients, number))
    return reads


def _buffer(sample: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
    layer, kept = torch.nn.Identity(), KeptState()
    value = sample[:, :, :, :0]  # keys are enough
    reads = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        with kept.of(0, 0, number, bounds, backward=False):
            assert kept.running is not None
            key, _ = kept.running.with_earlier(layer, sample[begin:end], value[begin:end])
        reads.append(key)
    return reads


def _run(way: Way, sample: torch.Tensor, bounds: Sequence[int], incoming: torch.Tensor) -> float:
    """Run forwards in order and backwards in reverse; return the seconds."""
    sample.grad = None
    begin_s = perf_counter()
    reads = way(sample, bounds)
    while reads:
        read = reads.pop()
        read.backward(incoming[: len(read)])
    return perf_counter() - begin_s


def _figures(
    way: Way, sample: torch.Tensor, bounds: Sequence[int], incoming: torch.Tensor
) -> _Figures:
    reads = way(sample, bounds)
    storages = {read.untyped_storage().data_ptr(): read.untyped_storage() for read in reads}
    kept_bytes = sum(storage.nbytes() for storage in storages.values())
    del reads, storages
    # The gradients of the sample itself add up outside of both ways.
    with _Written() as written:
        _run(way, sample, bounds, incoming)
    return _Figures(written.num_bytes, kept_bytes)


def compare_ways(length: int, numbers_of_slices: Sequence[int]) -> str:
    """Return a table of both ways for a sample of that many tokens."""
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(length, 1, _HEADS, _WIDTH, generator=generator, requires_grad=True)
    incoming = torch.randn(length, 1, _HEADS, _WIDTH, generator=generator)
    rows = [["slices", "written, buffer", "appended", "kept, buffer", "appended", "time ratio"]]
    for num_slices in numbers_of_slices:
        bounds = token_bounds(shares_of_equal_cost(num_slices, _ATTENTION), length)
        gradients = []
        for way in (_buffer, _append):
            _run(way, sample, bounds, incoming)
            assert sample.grad is not None
            gradients.append(sample.grad)
        assert gradients[0].equal(gradients[1])
        ratios = []
        gc.collect()
        for _ in range(_PAIRS):
            ratios.append(
                _run(_buffer, sample, bounds, incoming) / _run(_append, sample, bounds, incoming)
            )
        row = [str(num_slices)]
        figures = [_figures(way, sample, bounds, incoming) for way in (_buffer, _append)]
        row += [f"{figure.written_bytes / sample.nbytes:.1f}" for figure in figures]
        row += [f"{figure.kept_bytes / sample.nbytes:.1f}" for figure in figures]
        rows.append([*row, f"{median(ratios):.2f}"])
    return f"keys of one sample of {length} tokens, in units of their bytes\n\n{aligned(rows)}"
