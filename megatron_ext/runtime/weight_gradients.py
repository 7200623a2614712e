"""Linear layers whose backward defers the weight gradient.

The backward of a linear layer is two GEMMs: the input gradient, which the previous stage waits for,
and the weight gradient, which is not needed before the optimizer step. Here a layer's backward
computes the first and records the second as a `WeightGradient`, which keeps both operands until
`accumulate`. The result is bitwise equal to upstream's backward. With sequence parallelism, the
input of the next layer is gathered while this layer's GEMM runs (`Fetching`).

The idea comes from "Zero Bubble Pipeline Parallelism" (Qi et al., 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import (
    get_tensor_model_parallel_group_if_none,
    prepare_input_tensors_for_wgrad_compute,
)

from megatron_ext.upstream.signatures import linear_parameters

__all__ = [
    "Fetching",
    "Record",
    "WeightGradient",
    "accumulate",
    "grouped_product",
    "in_stream",
    "is_splittable",
    "linear",
    "mark_embedding",
    "stream_of_backward",
]

_EMBEDDING = "megatron_ext_is_embedding"

_BUFFERS = ("mpu", "megatron_ext.mpu")
"""Megatron's memory for gathered inputs, and a second one, which a gather writes while a GEMM reads
the first."""


class WeightGradient(Protocol):
    """A deferred weight-gradient GEMM."""

    weight: torch.nn.Parameter
    fused: bool
    """Whether the GEMM kernel itself accumulates into `main_grad`."""

    def fetch(self, buffer: str) -> None:
        """Start to gather an operand that other ranks have a part of, if there is one.

        Args:
            buffer: The name of Megatron's global memory that the operand may take.
        """

    def compute(self) -> torch.Tensor | None:
        """Return the gradient; if `fused`, accumulate it into `main_grad` and return None."""


Record = Callable[[WeightGradient], None]
"""Stores a deferred gradient; called in the layer's backward."""


def mark_embedding(weight: torch.nn.Parameter) -> None:
    """Mark a weight as an embedding's, so that its gradient is never deferred."""
    # A stage may tie it to the output layer. Autograd sums the gradients of both uses in the
    # backward. Deferring one would add the two to `main_grad` separately and change the last bits.
    setattr(weight, _EMBEDDING, True)


def is_splittable(weight: torch.Tensor) -> bool:
    """Return whether a weight's gradient may be deferred.

    False for embeddings (see `mark_embedding`), for weights computed from parameters, and for
    Megatron's FSDP, whose gradients have no memory of their own.
    """
    return weight.is_leaf and not (hasattr(weight, _EMBEDDING) or hasattr(weight, "__fsdp_param__"))


class Fetching:
    """Starts gathers of operands one gradient ahead of the GEMMs, so that they overlap.

    All tensor-parallel ranks of a stage compute the same gradients in the same order, which is also
    the order of the gathers.

    Args:
        gradients: All gradients of a W, in the order in which they will be computed.
    """

    def __init__(self, gradients: Iterable[WeightGradient]) -> None:
        self._ahead = deque(gradients)
        self._num_started = 0
        self.advance()

    def advance(self) -> None:
        """Start the next gather, just before a gradient is computed."""
        if self._ahead:
            self._ahead.popleft().fetch(_BUFFERS[self._num_started % 2])
            self._num_started += 1


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
    runtime = torch.get_device_module(stream.device)
    current = runtime.current_stream(stream.device)
    if current == stream:
        yield
        return
    stream.wait_stream(current)
    with runtime.stream(stream):
        yield
    current.wait_stream(stream)


@torch.no_grad()
def accumulate(products: list[WeightGradient], fetching: Fetching) -> None:
    """Compute one weight's deferred gradients, accumulate them and drop their operands.

    They go to `main_grad`, or to `grad` without DDP.

    Args:
        products: The gradients of one weight; empty afterwards.
        fetching: Fetches the operands of these and of later gradients.
    """
    weight = products[0].weight
    total: torch.Tensor | None = None
    # Unfused gradients are summed first, in the order of their records, and the sum is added once,
    # as autograd does for several uses of a weight in one backward: the same bits.
    products.reverse()
    while products:
        fetching.advance()
        product = products.pop().compute()
        total = product if total is None or product is None else total.add_(product)
    if total is None:
        return
    gradient = getattr(weight, "main_grad", None)
    if gradient is None:
        gradient = weight.grad
    if gradient is None:
        weight.grad = total.view_as(weight)
    else:
        gradient.add_(total.view_as(gradient))


class _Unchanged:
    """Checks that kept operands were not modified in place."""

    def __init__(self, *operands: torch.Tensor) -> None:
        self._versions = [operand._version for operand in operands]

    def check(self, *operands: torch.Tensor) -> None:
        if [operand._version for operand in operands] != self._versions:
            raise RuntimeError(
                "an operand of a weight gradient was modified in place between the backward of its "
                "layer and W; the layer cannot be split"
            )


# -- Column- and RowParallelLinear -----------------------------------------------------------------


@dataclass
class _LinearGradient:
    """`grad_output.t() @ input`, computed as upstream does: `[out, in]`."""

    weight: Any  # a parameter, with the attributes that DDP gives it
    input: torch.Tensor
    grad_output: torch.Tensor
    gather_group: torch.distributed.ProcessGroup | None
    """The group over which sequence parallelism splits `input`; None if it is whole."""
    fused: bool
    _unchanged: _Unchanged = field(init=False)
    _gathered: tuple[torch.Tensor, torch.distributed.Work] | None = field(default=None, init=False)
    """The whole input `[s, b, h]`, and when it is there."""

    def __post_init__(self) -> None:
        self._unchanged = _Unchanged(self.input, self.grad_output)

    def fetch(self, buffer: str) -> None:
        if self.gather_group is None:
            return
        size = [self.input.size(0) * self.gather_group.size(), *self.input.shape[1:]]
        whole = get_global_memory_buffer().get_tensor(size, self.input.dtype, buffer)
        arrival = layers.dist_all_gather_func(
            whole, self.input, group=self.gather_group, async_op=True
        )
        self._gathered = whole, arrival

    def compute(self) -> torch.Tensor | None:
        self._unchanged.check(self.input, self.grad_output)
        total_input = self.input
        if self._gathered is not None:
            total_input, arrival = self._gathered
            arrival.wait()
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            self.grad_output, total_input
        )
        if not self.fused:
            return torch.matmul(grad_output.t(), total_input)
        main_grad = self.weight.main_grad
        kernels = layers.fused_weight_gradient_mlp_cuda
        if main_grad.dtype == torch.float32:
            kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
        else:
            kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
        return None


# Given such a list, upstream's backward appends the output gradient and skips the weight gradient.
# Upstream postpones the output layer's weight gradient to the end of the step that way.
class _GradOutputBuffer:
    """Stands in for upstream's `grad_output_buffer` list."""

    def __init__(
        self,
        record: Record,
        weight: Any,
        input_: torch.Tensor,
        gather_group: torch.distributed.ProcessGroup | None,
        fused: bool,
    ) -> None:
        self._record = record
        self._weight = weight
        self._input = input_.detach()  # without its graph
        self._gather_group = gather_group
        self._fused = fused

    def append(self, grad_output: torch.Tensor) -> None:
        """Record the deferred gradient; called by upstream's backward."""
        if getattr(self._weight, "main_grad", self) is None:
            del self._weight.main_grad  # upstream's backward set it: no DDP, no such attribute
        self._record(
            _LinearGradient(self._weight, self._input, grad_output, self._gather_group, self._fused)
        )


# If upstream skips the weight gradient, it skips the flattening too. The sum would then run over
# the dimensions s and b separately, which changes the last bits.
class _AddBias(torch.autograd.Function):
    """Adds a bias whose gradient is summed over flattened tokens, as in upstream's layer."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return output + bias

    @staticmethod
    def backward(_ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat, _ = prepare_input_tensors_for_wgrad_compute(grad_output, grad_output)
        return grad_output, flat.sum(dim=0)


def linear(
    call: Callable[..., torch.Tensor], record: Record, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Run upstream's linear layer; its backward passes the weight gradient to `record`.

    Weights that cannot be split (`is_splittable`) take upstream's path unchanged.

    Args:
        call: Upstream's `linear_with_grad_accumulation_and_async_allreduce`.
        record: Stores the deferred gradient.
        *args: Arguments of `call`.
        **kwargs: Arguments of `call`.

    Returns:
        The output of `call`.
    """
    given = {**dict(zip(linear_parameters(), args, strict=False)), **kwargs}
    weight, bias = given["weight"], given["bias"]
    if given.get("grad_output_buffer") is not None or not is_splittable(weight):
        return call(**given)
    group = None
    if given["sequence_parallel"]:
        group = get_tensor_model_parallel_group_if_none(given.get("tp_group"))
    # Upstream's backward skips the weight GEMM only with fusion on. If the user did not ask for
    # fusion, no fused kernel runs.
    fused = given["gradient_accumulation_fusion"]
    given.update(
        bias=None,
        gradient_accumulation_fusion=True,
        grad_output_buffer=_GradOutputBuffer(record, weight, given["input"], group, fused),
        wgrad_deferral_limit=0,
    )
    output = call(**given)
    return output if bias is None else _AddBias.apply(output, bias)


# -- grouped experts -------------------------------------------------------------------------------


@dataclass
class _GroupedGradient:
    """The weight gradients of all experts, computed by the backward of the library's `gmm`."""

    weight: torch.nn.Parameter
    experts: torch.Tensor
    """A separate leaf that shares the weight's memory."""
    product: torch.autograd.graph.GradientEdge
    """The output of `gmm`; only `experts` requires grad in its graph."""
    grad_output: torch.Tensor
    fused: bool = False
    _unchanged: _Unchanged = field(init=False)

    def __post_init__(self) -> None:
        self._unchanged = _Unchanged(self.grad_output)

    def fetch(self, buffer: str) -> None:
        """Do nothing: this rank has all operands."""

    def compute(self) -> torch.Tensor:
        self._unchanged.check(self.grad_output)
        (gradient,) = torch.autograd.grad(self.product, self.experts, self.grad_output)
        return gradient


class _GroupedProduct(torch.autograd.Function):
    """The library's `gmm` with a backward that computes only the gradient of the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        gmm: Callable[..., torch.Tensor],
        record: Record,
        batch_sizes: torch.Tensor,
        trans_b: bool,
    ) -> torch.Tensor:
        leaf = experts.detach().requires_grad_()
        with torch.enable_grad():
            product = gmm(tokens.detach(), leaf, batch_sizes, trans_b=trans_b)
        ctx.kept = (leaf, torch.autograd.graph.get_gradient_edge(product))
        ctx.parameter = experts._base
        ctx.call = (gmm, record, batch_sizes, trans_b)
        return product.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gmm, record, batch_sizes, trans_b = ctx.call
        experts, product = ctx.kept
        weight = ctx.parameter
        ctx.kept = None
        grad_output = grad_output.contiguous()
        record(_GroupedGradient(weight, experts, product, grad_output))
        grad_tokens = None
        if ctx.needs_input_grad[0]:
            grad_tokens = gmm(grad_output, experts.detach(), batch_sizes, trans_b=not trans_b)
        placeholder = None
        if hasattr(weight, "grad_added_to_main_grad"):
            # DDP's hook requires a gradient, but ignores it if grad_added_to_main_grad is set.
            placeholder = torch.empty_like(experts)
            weight.grad_added_to_main_grad = True
        return grad_tokens, placeholder, None, None, None, None


def grouped_product(
    gmm: Callable[..., torch.Tensor],
    record: Record,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    batch_sizes: torch.Tensor,
    trans_b: bool = False,
) -> torch.Tensor:
    """Multiply each expert's tokens by its weights; the backward records the weight gradient.

    Builds of grouped_gemm differ, so nothing of the library but `gmm` is called. The weight
    gradient comes from `gmm`'s own backward, on a graph that contains the weights alone.

    Args:
        gmm: `ops.gmm` of the grouped_gemm library.
        record: Stores the deferred gradient.
        tokens: Argument of `gmm`, `[tokens, in]`, sorted by expert.
        experts: Argument of `gmm`: the experts' weights, a view of the parameter.
        batch_sizes: Argument of `gmm`: tokens per expert.
        trans_b: Argument of `gmm`: whether `experts` is transposed.
    """
    weight = experts._base
    if weight is None or not is_splittable(weight) or not torch.is_grad_enabled():
        return gmm(tokens, experts, batch_sizes, trans_b=trans_b)
    product: torch.Tensor = _GroupedProduct.apply(
        tokens, experts, gmm, record, batch_sizes, trans_b
    )
    return product
