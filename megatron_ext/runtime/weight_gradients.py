"""Keeps the operands of deferred weight gradients until W and accumulates the products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class WeightGradient(ABC):
    """The deferred gradients of a layer's weights; most layers have only one weight.

    Except with Transformer Engine, the operands stay alive as long as this object does, because W
    may run in a stream other than the one that owns their memory.
    """

    weights: Sequence[Any]
    """The parameters, always in the same order."""
    is_fused = False
    """Whether the layer's kernel adds the product to `main_grad`."""

    def fetch(self, buffer: str) -> None:  # noqa: B027 - usually this rank has all operands
        """Start gathering an operand from several ranks into Megatron's global buffer `buffer`."""

    @abstractmethod
    def compute(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients; None for a gradient that the kernel has added to `main_grad`."""


class ArrivedGradient(WeightGradient):
    """A gradient from another use of a weight, waiting to be added to the layer's product."""

    def __init__(
        self,
        weights: Sequence[Any],
        weight: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        self.weights = weights
        self._gradients = [
            gradient if weight is layer_weight else None for layer_weight in weights
        ]

    def compute(self) -> list[torch.Tensor | None]:
        """Return the gradient, and None for the layer's other weights."""
        return self._gradients


class Unchanged:
    """Checks that stored operands were not modified in place."""

    def __init__(self, *operands: torch.Tensor) -> None:
        self._versions = [operand._version for operand in operands]

    def check(self, *operands: torch.Tensor) -> None:
        """Check that these operands have not changed since this object was created.

        Raises:
            RuntimeError: An operand was modified.
        """
        versions = [operand._version for operand in operands]
        if versions != self._versions:
            raise RuntimeError(
                "an operand of a weight gradient was modified in place between its layer's "
                "backward pass and W; do not modify it, or use a schedule that does not split "
                "backward passes, such as 1f1b"
            )


def will_accumulate(accumulator: torch.autograd.graph.Node) -> bool:
    """Return whether the running backward pass will add to a weight's gradient.

    Args:
        accumulator: The weight's AccumulateGrad node.
    """
    # The result is False in `torch.autograd.grad`, and in `backward(inputs=...)` if the inputs do
    # not include the weight.
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # torch raises inside `torch.autograd.grad` for this weight
        return False


def accumulates(weight: torch.Tensor) -> bool:
    """Return whether the running backward pass will add to the gradient of a leaf weight."""
    # Autograd drops the gradient of a weight that was frozen after its forward pass.
    if not weight.requires_grad:
        return False
    accumulator = torch.autograd.graph.get_gradient_edge(weight).node
    return will_accumulate(accumulator)


def stream_of_backward(weight: torch.Tensor) -> Any:
    """Return the current stream, which runs the layer's backward pass; None on a CPU."""
    if weight.device.type == "cpu":
        return None
    device_module = torch.get_device_module(weight.device)
    return device_module.current_stream(weight.device)


@contextmanager
def in_stream(stream: Any) -> Iterator[None]:
    """Run in a stream, after the current stream's earlier work and before its later work."""
    # With --moe-shared-expert-overlap, Megatron's shared experts run in a separate
    # stream, which owns their operands. If a W in another stream freed them, the next
    # kernel in the experts' stream could overwrite their memory while W was still
    # reading it.
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
    """Compute a layer's deferred gradients, accumulate them and drop their operands.

    The gradients are added to `main_grad`, or to `grad` without DDP. Before each gradient is
    computed, `fetch` starts gathering the operands for a later one. `products` is empty afterwards.
    """
    weights = products[0].weights
    # Sum unfused gradients first, in recording order, and add the sum once. Autograd
    # does the same if a weight is used several times in one backward pass, so the
    # results are bitwise identical.
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


def add_to(
    totals: list[torch.Tensor | None],
    gradients: Iterable[torch.Tensor | None],
) -> None:
    """Add each gradient to its total, skipping None."""
    for index, gradient in enumerate(gradients):
        total = totals[index]
        if gradient is None:
            continue
        if total is None:
            totals[index] = gradient
        else:
            totals[index] = total.add_(gradient)
