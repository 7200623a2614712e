"""Linear layers whose backward leaves the gradient of the weight for later.

The backward of a linear layer is two products: the gradient of the input, which the stage before
waits for, and the gradient of the weight, which nobody waits for before the optimizer. Here each
layer computes the first in its backward and hands the second over as a `WeightGradient`, which
keeps the two operands until `accumulate` is called. The result has the same bits as upstream's
backward.

The idea is that of "Zero Bubble Pipeline Parallelism" (Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import (
    get_tensor_model_parallel_group_if_none,
    prepare_input_tensors_for_wgrad_compute,
)

from megatron_ext.signatures import linear_parameters

__all__ = [
    "Record",
    "WeightGradient",
    "accumulate",
    "grouped_product",
    "is_splittable",
    "linear",
    "mark_embedding",
]

_EMBEDDING = "megatron_ext_is_embedding"


class WeightGradient(Protocol):
    """One product that is still to be computed."""

    weight: torch.nn.Parameter
    fused: bool
    """Whether the product is added to `main_grad` by the kernel that computes it."""

    def compute(self) -> torch.Tensor | None:
        """Return the product; None if `fused`, after adding it."""


Record = Callable[[WeightGradient], None]
"""Takes over a product, in the backward of its layer."""


def mark_embedding(weight: torch.nn.Parameter) -> None:
    """Note that a weight is an embedding's.

    A stage may use it as its output layer too. The gradient of the embedding is summed in the
    backward; leaving the other half for later would add the halves to `main_grad` one by one.
    """
    setattr(weight, _EMBEDDING, True)


def is_splittable(weight: torch.Tensor) -> bool:
    """Tell whether the gradient of a weight may be left for later.

    Not for weights of embeddings (see `mark_embedding`), weights that are computed from parameters,
    and those of Megatron's FSDP, whose gradients have no memory of their own.
    """
    return weight.is_leaf and not (hasattr(weight, _EMBEDDING) or hasattr(weight, "__fsdp_param__"))


@torch.no_grad()
def accumulate(products: list[WeightGradient]) -> None:
    """Compute the products of one weight, add them to its gradient and drop their operands.

    They are summed first and then added, as autograd does with the uses of a weight in one
    backward, in the order in which they were handed over. The list is empty afterwards.
    """
    weight = products[0].weight
    total: torch.Tensor | None = None
    products.reverse()
    while products:
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
    """Makes sure that nobody wrote to operands while they were kept."""

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
    """`grad_output.t() @ input`, as upstream computes it."""

    weight: Any  # a parameter, with the attributes that DDP gives it
    input: torch.Tensor
    grad_output: torch.Tensor
    gather_group: torch.distributed.ProcessGroup | None
    """The group over which the sequence of `input` is split, if it is."""
    fused: bool
    _unchanged: _Unchanged = field(init=False)

    def __post_init__(self) -> None:
        self._unchanged = _Unchanged(self.input, self.grad_output)

    def compute(self) -> torch.Tensor | None:
        self._unchanged.check(self.input, self.grad_output)
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            self.grad_output, self._gathered()
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

    def _gathered(self) -> torch.Tensor:
        """Return the whole input, in a buffer of upstream's that the next linear layer reuses."""
        if self.gather_group is None:
            return self.input
        size = [self.input.size(0) * self.gather_group.size(), *self.input.shape[1:]]
        whole: torch.Tensor = get_global_memory_buffer().get_tensor(size, self.input.dtype, "mpu")
        layers.dist_all_gather_func(whole, self.input, group=self.gather_group)
        return whole


class _GradOutputBuffer:
    """What upstream's backward takes for the list into which it puts the gradient of the output.

    With such a list it skips the gradient of the weight (upstream's own use is the output layer,
    whose product it can postpone to the end of the step).
    """

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
        self._input = input_.detach()  # not the graph behind it
        self._gather_group = gather_group
        self._fused = fused

    def append(self, grad_output: torch.Tensor) -> None:
        """Hand the product over; called by upstream's backward."""
        if getattr(self._weight, "main_grad", self) is None:
            del self._weight.main_grad  # upstream's backward set it: no DDP, no such attribute
        self._record(
            _LinearGradient(self._weight, self._input, grad_output, self._gather_group, self._fused)
        )


class _AddBias(torch.autograd.Function):
    """Adds a bias; its gradient is summed over the flattened tokens, as upstream's layer does.

    Upstream leaves out the flattening if it skips the gradient of the weight, and autograd then
    sums the two dimensions one after the other, which gives other last bits.
    """

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
    """Run upstream's linear layer such that its backward leaves the weight's gradient to `record`.

    `call` is upstream's `linear_with_grad_accumulation_and_async_allreduce`, and the arguments
    after `record` are its own. Weights that cannot be split (`is_splittable`) are left to it.
    """
    given = {**dict(zip(linear_parameters(), args, strict=False)), **kwargs}
    weight, bias = given["weight"], given["bias"]
    if given.get("grad_output_buffer") is not None or not is_splittable(weight):
        return call(**given)
    group = None
    if given["sequence_parallel"]:
        group = get_tensor_model_parallel_group_if_none(given.get("tp_group"))
    # Fusion is what lets upstream's backward do without a product; if it was not asked for, no
    # kernel of it is called.
    fused = given["gradient_accumulation_fusion"]
    given.update(
        bias=None,
        gradient_accumulation_fusion=True,
        grad_output_buffer=_GradOutputBuffer(record, weight, given["input"], group, fused),
        wgrad_deferral_limit=0,
    )
    output = call(**given)
    return output if bias is None else _AddBias.apply(output, bias)


# -- experts in one grouped product ----------------------------------------------------------------


@dataclass
class _GroupedGradient:
    """The gradients of the weights of all experts, by the backward of the library's product."""

    weight: torch.nn.Parameter
    experts: torch.Tensor
    """A leaf of its own that shares the memory of the weight."""
    product: torch.autograd.graph.GradientEdge
    """The library's product, of which only `experts` needs a gradient."""
    grad_output: torch.Tensor
    fused: bool = False
    _unchanged: _Unchanged = field(init=False)

    def __post_init__(self) -> None:
        self._unchanged = _Unchanged(self.grad_output)

    def compute(self) -> torch.Tensor:
        self._unchanged.check(self.grad_output)
        (gradient,) = torch.autograd.grad(self.product, self.experts, self.grad_output)
        return gradient


class _GroupedProduct(torch.autograd.Function):
    """The library's product, with a backward that computes the gradient of the tokens only."""

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
            # DDP's hook wants a gradient; it does not read one that is said to be added.
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
    """Multiply the tokens of each expert by its weights, and record the gradient of the weights.

    `gmm` is the `ops.gmm` of the grouped_gemm library, and the arguments after `record` are its
    own. Nothing else of the library is called, whose builds differ: a graph of the weights alone,
    made by the product itself, serves for their gradient.
    """
    weight = experts._base
    if weight is None or not is_splittable(weight) or not torch.is_grad_enabled():
        return gmm(tokens, experts, batch_sizes, trans_b=trans_b)
    product: torch.Tensor = _GroupedProduct.apply(
        tokens, experts, gmm, record, batch_sizes, trans_b
    )
    return product
