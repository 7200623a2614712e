"""Runs the backward pass of Column- and RowParallelLinear without the weight-gradient GEMM.

Megatron's autograd function runs unmodified, both forward and backward. In the executor's I, it
gets a context that makes it skip the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_ext.runtime.weight_gradients import (
    Unchanged,
    WeightGradient,
    will_accumulate,
)

if TYPE_CHECKING:
    from megatron_ext.runtime.split import SplitBackward

# Positions in the tensor inputs of Megatron's function: input, weight, bias. Its
# backward pass returns its results in the same positions, followed by None for the
# remaining inputs.
_WEIGHT = 1
_BIAS = 2


def linear_backward(
    backward: Callable[..., tuple[Any, ...]],
    splits: SplitBackward,
    ctx: Any,
    grad_output: torch.Tensor,
) -> tuple[Any, ...]:
    """Run the backward pass of a Megatron linear layer; defer the weight gradient to W if possible.

    Args:
        backward: The backward of `LinearWithGradAccumulationAndAsyncCommunication`.
        splits: Receives the deferred gradient; its `defer` context is active.
        ctx: The function's context.
        grad_output: Output gradient, `[s, b, out]`.

    Returns:
        The gradients of all inputs, as returned by `backward`; None for a weight whose gradient is
        deferred.
    """
    accumulator = ctx.next_functions[_WEIGHT][0]
    # Do not read the saved tensor: hooks on saved tensors return copies, and torch's
    # checkpoint allows each saved tensor to be unpacked only once. If the node has no
    # `variable`, the weight is not a leaf.
    weight: Any = getattr(accumulator, "variable", None)
    # Since 0.19, the weight itself may be gathered.
    is_gathered = getattr(ctx, "gtp_remat_size", 1) != 1
    waits = (
        isinstance(weight, torch.nn.Parameter)
        and ctx.grad_output_buffer is None  # --defer-embedding-wgrad-compute
        and not is_gathered
        and weight.requires_grad  # if frozen after the forward pass, autograd drops its gradient
        and will_accumulate(accumulator)
        and splits.may_wait(weight, gathers=ctx.sequence_parallel)
    )
    if not waits:
        return backward(ctx, grad_output)
    without_weight = _ContextWithoutWeight(ctx, weight)
    gradients = list(backward(without_weight, grad_output))
    gradients[_BIAS] = without_weight.grad_bias
    splits.record(without_weight.gradient)
    return tuple(gradients)


class _ContextWithoutWeight:
    """A context that makes a layer's backward pass compute only the input gradient.

    If `grad_output_buffer` is a list, upstream's backward pass appends the output gradient to it
    and skips the weight gradient. Upstream uses this to defer the output layer's weight gradient to
    the end of the step. This object also acts as that list.
    """

    # Otherwise, upstream always computes the product.
    gradient_accumulation_fusion = True
    wgrad_deferral_limit = 0  # the list may have any length
    # Upstream would sum over s and b separately, which changes the low-order bits of
    # the result.
    use_bias = False

    def __init__(self, ctx: Any, weight: torch.nn.Parameter) -> None:
        self._ctx = ctx
        self._weight = weight
        self._input, saved_weight = ctx.saved_tensors
        # Pass a view, which lacks the parameter's attributes. If the attributes were present,
        # upstream would return uninitialised memory as the weight's gradient, as a placeholder for
        # DDP's hook. Like the parameter, the view requires a gradient: if the output gradient is
        # not contiguous, `torch.matmul` chooses between one GEMM and a batched one by that, and the
        # two round differently.
        view = saved_weight.detach().requires_grad_(saved_weight.requires_grad)
        self.saved_tensors = self._input, view
        self.gradient: LinearGradient
        self.grad_bias: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def grad_output_buffer(self) -> _ContextWithoutWeight:
        """The list that upstream appends to."""
        # This is a property because an attribute would create a reference cycle that keeps the
        # operands alive after W.
        return self

    def append(self, grad_output: torch.Tensor) -> None:
        """Store the output gradient; upstream calls this instead of computing the product."""
        # Create the gradient here, because upstream has entered the autocast context of
        # the layer's forward pass.
        self.gradient = LinearGradient(
            self._weight,
            self._input,
            grad_output,
            self._ctx,
        )
        if self._ctx.use_bias:
            flat, _ = prepare_input_tensors_for_wgrad_compute(grad_output, grad_output)
            self.grad_bias = flat.sum(dim=0)


class LinearGradient(WeightGradient):
    """`grad_output.t() @ input`, `[out, in]`; a fused kernel adds the product to `main_grad`."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        input_: torch.Tensor,
        grad_output: torch.Tensor,
        ctx: Any,
    ) -> None:
        self.weights = (weight,)
        self.is_fused = ctx.gradient_accumulation_fusion
        self.input = input_.detach()  # without its graph
        self.grad_output = grad_output.detach()
        # The group over which sequence parallelism splits the input; None if the input is not
        # split.
        self._gather_group = ctx.tp_group if ctx.sequence_parallel else None
        # The whole input, `[s, b, h]`, and the pending gather that fills it.
        self._gathered: tuple[torch.Tensor, torch.distributed.Work] | None = None
        self._autocast: AbstractContextManager[object] = nullcontext()
        device_type = grad_output.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            self._autocast = torch.autocast(device_type, dtype)
        self._unchanged = Unchanged(self.input, self.grad_output)

    def fetch(self, buffer: str) -> None:
        """Start gathering the input, if it is split."""
        if self._gather_group is None:
            return
        share = self.input
        length = share.size(0) * self._gather_group.size()
        total_input = get_global_memory_buffer().get_tensor(
            [length, *share.shape[1:]],
            share.dtype,
            buffer,
        )
        arrival = layers.dist_all_gather_func(
            total_input,
            share,
            group=self._gather_group,
            async_op=True,
        )
        self._gathered = (total_input, arrival)

    def compute(self) -> list[torch.Tensor | None]:
        """Return the gradient, or accumulate it if the kernel is fused."""
        self._unchanged.check(self.input, self.grad_output)
        total_input = self.input
        if self._gathered is not None:
            total_input, arrival = self._gathered
            arrival.wait()
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            self.grad_output,
            total_input,
        )
        weight = self.weights[0]
        if not self.is_fused:
            with self._autocast:
                product = torch.matmul(grad_output.t(), total_input)
            return [product.to(weight.dtype)]  # as autograd does
        main_grad = weight.main_grad
        kernels = layers.fused_weight_gradient_mlp_cuda
        if main_grad.dtype == torch.float32:
            kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
        else:
            kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
        return [None]
