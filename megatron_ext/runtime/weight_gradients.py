"""Weight gradients that wait for W: their operands, and where the products go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class WeightGradient(ABC):
    """The deferred gradients of a layer's weights, mostly of one."""

    weights: Sequence[Any]
    """Parameters, always in the same order."""
    is_fused = False
    """Whether a kernel of the layer adds the product to `main_grad`."""

    def fetch(self, buffer: str) -> None:  # noqa: B027 - mostly this rank has all operands
        """Start to gather an operand of several ranks, in Megatron's global memory `buffer`."""

    @abstractmethod
    def compute(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients; None: the GEMM kernel has accumulated it into `main_grad`."""


class ArrivedGradient(WeightGradient):
    """A gradient from another use of a weight, which waits to be added to the layer's product."""

    def __init__(
        self, weights: Sequence[Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        self.weights = weights
        self._gradients = [gradient if weight is layer_weight else None for layer_weight in weights]

    def compute(self) -> list[torch.Tensor | None]:
        """Return the gradient, and None for the layer's other weights."""
        return self._gradients


class Unchanged:
    """Checks that kept operands were not modified in place."""

    def __init__(self, *operands: torch.Tensor) -> None:
        self._versions = [operand._version for operand in operands]

    def check(self, *operands: torch.Tensor) -> None:
        """Compare the operands with those given to the constructor.

        Raises:
            RuntimeError: One of them was modified.
        """
        if [operand._version for operand in operands] != self._versions:
            raise RuntimeError(
                "an operand of a weight gradient was modified in place between the backward of its "
                "layer and W; the layer cannot be split"
            )


def will_accumulate(accumulator: torch.autograd.graph.Node) -> bool:
    """Return whether the backward in progress will add to the gradient of a weight.

    Args:
        accumulator: The weight's AccumulateGrad node.
    """
    # Not inside of `torch.autograd.grad`, nor of `backward(inputs=...)` for other tensors.
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # `torch.autograd.grad` for this very weight, which torch does not answer
        return False


def accumulator_of(weight: torch.Tensor) -> torch.autograd.graph.Node:
    """Return the AccumulateGrad node of a weight, which is a leaf."""
    return torch.autograd.graph.get_gradient_edge(weight).node


def stream_of_backward(weight: torch.Tensor) -> Any:
    """Return the stream in which the backward of a weight's layer runs now; None on a CPU."""
    if weight.device.type == "cpu":
        return None
    return torch.get_device_module(weight.device).current_stream(weight.device)


@contextmanager
def in_stream(stream: Any) -> Iterator[None]:
    """Work in a stream, after the work of the current one and before what that will do next."""
    # Megatron's shared experts run in a stream of their own (--moe-shared-expert-overlap), which
    # their operands belong to. Freed by another stream's W, that memory would be given to the next
    # kernel of their own while W still reads it.
    if stream is None:
        yield
        return
    runtime: Any = torch.get_device_module(stream.device)
    current = runtime.current_stream(stream.device)
    if current == stream:
        yield
        return
    stream.wait_stream(current)
    with runtime.stream(stream):
        yield
    current.wait_stream(stream)


@torch.no_grad()
def accumulate(products: list[WeightGradient], fetch: Callable[[], None]) -> None:
    """Compute the deferred gradients of a layer, accumulate them and drop their operands.

    They go to `main_grad`, or to `grad` without DDP. `fetch` starts the gather of the operands of a
    later gradient, just before one is computed. `products` is empty afterwards.
    """
    weights = products[0].weights
    # Unfused gradients are summed first, in the order of their records, and the sum is added once,
    # as autograd does for several uses of a weight in one backward: the same bits.
    totals: list[torch.Tensor | None] = [None for _ in weights]
    products.reverse()
    while products:
        fetch()
        add_to(totals, products.pop().compute())
    for weight, total in zip(weights, totals, strict=True):
        if total is None:
            continue
        gradient = getattr(weight, "main_grad", None)
        if gradient is None:
            gradient = weight.grad
        if gradient is None:
            weight.grad = total.view_as(weight)
        else:
            gradient.add_(total.view_as(gradient))


def add_to(totals: list[torch.Tensor | None], gradients: Iterable[torch.Tensor | None]) -> None:
    """Add to each sum its gradient, if there is one."""
    for index, gradient in enumerate(gradients):
        total = totals[index]
        if gradient is None:
            continue
        if total is None:
            totals[index] = gradient
        else:
            totals[index] = total.add_(gradient)
