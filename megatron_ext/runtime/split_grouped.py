"""Defers grouped_gemm's weight gradient to W, for grouped experts in Megatron 0.16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.runtime.weight_gradients import (
    Unchanged,
    WeightGradient,
    accumulates,
)

if TYPE_CHECKING:
    from megatron_ext.runtime.split import SplitBackward


class _GroupedGradient(WeightGradient):
    """The weight gradients of all experts, computed by the backward pass of `product`."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        experts: torch.Tensor,
        product: torch.autograd.graph.GradientEdge,
        grad_output: torch.Tensor,
    ) -> None:
        self.weights = (weight,)
        self.grad_output = grad_output
        self._experts = experts
        self._product = product
        self._unchanged = Unchanged(grad_output)

    def compute(self) -> Sequence[torch.Tensor]:
        """Return the gradient."""
        self._unchanged.check(self.grad_output)
        return torch.autograd.grad(self._product, self._experts, self.grad_output)


class _GroupedProduct(torch.autograd.Function):
    """The library's `gmm` on a separate graph; its backward pass runs whole or in two parts."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        gmm: Callable[..., torch.Tensor],
        splits: SplitBackward,
        batch_sizes: torch.Tensor,
        trans_b: bool,
    ) -> torch.Tensor:
        tokens_leaf = tokens.detach().requires_grad_(ctx.needs_input_grad[0])
        experts_leaf = experts.detach().requires_grad_()
        with torch.enable_grad():
            product = gmm(tokens_leaf, experts_leaf, batch_sizes, trans_b=trans_b)
        product_edge = torch.autograd.graph.get_gradient_edge(product)
        ctx.graph = (tokens_leaf, experts_leaf, product_edge)
        ctx.parameter = experts._base
        ctx.splits = splits
        ctx.call = (gmm, batch_sizes, trans_b)
        return product.detach()

    @staticmethod
    @once_differentiable  # as in the library: autograd cannot differentiate its kernels
    def backward(
        ctx: Any,
        grad_output: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        tokens, experts, product = ctx.graph
        weight = ctx.parameter
        splits = ctx.splits
        grad_output = grad_output.contiguous()
        waits = splits.is_deferring and accumulates(weight) and splits.may_wait(weight)
        grad_tokens = None
        grad_experts = None
        if waits:
            gmm, batch_sizes, trans_b = ctx.call
            ctx.graph = None  # W frees it
            splits.record(_GroupedGradient(weight, experts, product, grad_output))
            if tokens.requires_grad:
                grad_tokens = gmm(
                    grad_output,
                    experts.detach(),
                    batch_sizes,
                    trans_b=not trans_b,
                )
        elif tokens.requires_grad:
            # Keep the graph, in case the backward pass retains it.
            grad_tokens, grad_experts = torch.autograd.grad(
                product,
                (tokens, experts),
                grad_output,
                retain_graph=True,
            )
        else:
            [grad_experts] = torch.autograd.grad(
                product,
                experts,
                grad_output,
                retain_graph=True,
            )
        return grad_tokens, grad_experts, None, None, None, None


def grouped_product(
    gmm: Callable[..., torch.Tensor],
    splits: SplitBackward,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    batch_sizes: torch.Tensor,
    trans_b: bool = False,
) -> torch.Tensor:
    """Multiply each expert's tokens by its weights; I defers the weight gradient to W.

    `tokens` is `[tokens, in]`, sorted by expert, and `experts` is a view of the parameter.
    """
    # Builds of grouped_gemm differ, so only call the library's `ops.gmm`. `gmm`'s own
    # backward pass computes all gradients except the token gradient in I, which is
    # computed by another call to `gmm`.
    is_view = experts._base is not None
    needs_gradient = experts.requires_grad and torch.is_grad_enabled()
    if not is_view or not needs_gradient:
        return gmm(tokens, experts, batch_sizes, trans_b=trans_b)
    product: torch.Tensor = _GroupedProduct.apply(
        tokens,
        experts,
        gmm,
        splits,
        batch_sizes,
        trans_b,
    )
    return product
