"""Splits a stage's backward: I computes input gradients, W computes weight gradients.

The backward of a linear layer is two GEMMs: the input gradient, which the previous stage waits for,
and the weight gradient, which is not needed before the optimizer step. F and I of a micro-batch run
inside `SplitBackward.defer(stage, microbatch)`; W is `SplitBackward.run(stage, microbatch)`. In
between, the two operands of each weight gradient are kept: the layer's input and the gradient of
its output. The result is bitwise equal to upstream's backward. The idea comes from "Zero Bubble
Pipeline Parallelism" (Qi et al., 2023).

Deferred to W: the weights of Column- and RowParallelLinear (attention, MLP, sequential experts, the
output layer), grouped experts, and Transformer Engine layers built for it. Everything else stays in
I: embeddings and weights tied to one on the same stage, norms, biases, the router.

Contract with the executor:

* If F ran in `defer`, the backward must run in `defer` too, followed by `run`. The F of an unsplit
  B runs without `defer`.
* The order of a stage's Ws decides the last bits, and all ranks of a tensor-parallel group run
  their Ws in the same order.
* Message memory may be reused after W, not after I.
* Split chunks stay in DDP's `no_sync` for the whole step (`runtime/sync.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, cycle
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import (
    get_tensor_model_parallel_group_if_none,
    prepare_input_tensors_for_wgrad_compute,
)

from megatron_ext.runtime.offloading import is_offloading
from megatron_ext.upstream.signatures import parameters

# The function behind Column- and RowParallelLinear.
_LINEAR = "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce"
_Key = tuple[int, int]
Progress = Callable[[AbstractSet[int]], None]
"""Callback with the ids of the weights whose gradients remain to be computed."""

# Megatron's memory for gathered inputs, and a second one, which a gather writes while a GEMM reads
# the first.
_BUFFERS = ("mpu", "megatron_ext.mpu")


class SplitBackward:
    """Holds a configuration's deferred weight gradients, by stage and micro-batch."""

    def __init__(self) -> None:
        # A plain attribute: autograd runs CUDA backwards in its own thread, which sees neither
        # thread-locals nor context variables of the caller.
        self._key: _Key | None = None
        # By id of the weight, or of the first one of a layer with several. Weights and gradients
        # keep the order of their records, which decides the bits.
        self._waiting: dict[_Key, dict[int, list[WeightGradient]]] = {}
        # By the same id: the stream in which the layer runs backward.
        self._streams: dict[int, Any] = {}
        self._marked: list[torch.nn.Parameter] = []
        self._postponing: dict[int, PostponingLayers] = {}
        self._progress: Progress | None = None
        self.has_deferred = False
        """Whether any layer of this process has left a weight gradient to W."""

    @property
    def record(self) -> Record | None:
        """The sink for weight gradients of layers that run now; None: layers compute their own."""
        return None if self._key is None else partial(self._record, self._key)

    @property
    def overwrites_first(self) -> bool:
        """Whether layers overwrite their weight gradients at a step's first micro-batch."""
        return any(layers.overwrites_first for layers in self._postponing.values())

    def register_modules(self, stage: int, chunk: torch.nn.Module, *, splits: bool = True) -> None:
        """Register the model chunk of a stage, so that its Transformer Engine layers leave W here.

        Call it before each step; known chunks cost nothing. Without it, layers built to postpone
        their weight gradients would do so forever. Where no backward splits they are Megatron's own
        matter, as with `overlap_dispatch_backward_with_experts_wgrad`.
        """
        known = self._postponing.get(stage)
        if known is None or known.chunk is not chunk:
            self._postponing[stage] = PostponingLayers(chunk, self._put if splits else None)

    def defer(self, stage: int, microbatch: int) -> _Deferral:
        """Return a context in which layers defer their weight gradients to `run`.

        For the forward, where layers take their `record`, and again for the backward.
        """
        layers = self._postponing.get(stage)
        return _Deferral(self, (stage, microbatch), layers if layers and layers.layers else None)

    @contextmanager
    def reporting(self, progress: Progress) -> Iterator[None]:
        """Call `progress` before the first weight and after each weight of a W in the block."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = None

    def run(self, stage: int, microbatch: int) -> None:
        """Run W: compute a micro-batch's weight gradients and accumulate them.

        They go into `main_grad`, or into `grad` without DDP. Operands are freed weight by weight. A
        stage without deferred weights does nothing.
        """
        waiting = self._waiting.pop((stage, microbatch), {})
        remaining = {id(w) for gradients in waiting.values() for w in gradients[0].weights}
        # With sequence parallelism this all-gathers the inputs again, one gradient ahead of the
        # GEMMs, so that they overlap: a collective, so all tensor-parallel ranks of a stage compute
        # the same gradients in the same order.
        ahead = deque(zip(chain.from_iterable(waiting.values()), cycle(_BUFFERS), strict=False))

        def fetch() -> None:
            if ahead:
                gradient, buffer = ahead.popleft()
                gradient.fetch(buffer)

        def report() -> None:
            if self._progress is not None:
                self._progress(remaining)

        report()
        fetch()
        for weight, gradients in waiting.items():
            done = gradients[0].weights
            with in_stream(self._streams[weight]):
                accumulate(gradients, fetch)
            remaining.difference_update(map(id, done))
            report()

    def pending(self) -> list[_Key]:
        """Return the (stage, micro-batch) keys whose W has not run, sorted."""
        return sorted(self._waiting)

    def clear(self) -> None:
        """Drop all deferred gradients after a failed step."""
        self._key = None
        self._waiting.clear()
        self._unmark()

    def _record(self, key: _Key, gradient: WeightGradient) -> None:
        # Its operands may be messages: a received gradient, or an activation that the first layer
        # uses directly. They stay until W.
        weight = gradient.weights[0]
        self.has_deferred = True
        self._waiting.setdefault(key, {}).setdefault(id(weight), []).append(gradient)
        self._streams[id(weight)] = stream_of_backward(weight)
        self._marked += gradient.weights

    def _put(self, layer: Any, operands: list[Any], product: Callable[..., Any]) -> None:
        """Take what a Transformer Engine layer queues, in place of `WeightGradStore.put`."""
        assert self._key is not None, "layers postpone inside `defer` only"
        if any(getattr(layer, name, False) for name in _GATHERS_IN_USER_BUFFERS):
            operands = [_copied(operand) for operand in operands]
        gradient: Any = _QueuedGradients(layer)
        if not layer.fuse_wgrad_accumulation:
            if isinstance(operands[-1], list):
                product = _into_new_memory(operands[-1], product)
            for weight in gradient.weights:
                if hasattr(weight, "main_grad"):
                    # DDP's hook fires in I, wants a gradient and adds it, unless it has been added.
                    nothing = weight.main_grad.new_zeros((), dtype=weight.dtype)
                    weight.grad, weight.grad_added_to_main_grad = nothing.expand(weight.shape), True
                    self._marked.append(weight)
        found = self._waiting.get(self._key, {}).get(id(gradient.weights[0]))
        if found is None:
            self._record(self._key, gradient)
        else:
            gradient = found[0]
        gradient.entries.put([operands, product])

    def _unmark(self) -> None:
        """Reset the flags that kept DDP's hooks from adding placeholder gradients."""
        # A flag left set would make the hooks drop the gradients of unsplit backwards.
        for weight in self._marked:
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False
        self._marked.clear()


# A class, not a generator, which costs more: every micro-batch enters it twice.
class _Deferral:
    """The context of `defer`."""

    __slots__ = ("_key", "_layers", "_split")

    def __init__(self, split: SplitBackward, key: _Key, layers: PostponingLayers | None) -> None:
        self._split, self._key, self._layers = split, key, layers

    def __enter__(self) -> None:
        split = self._split
        assert split._key is None, f"{self._key} inside {split._key}"
        split._key = self._key
        if self._layers is not None:
            self._layers.postpone(on=True)

    def __exit__(self, *_: object) -> None:
        split = self._split
        split._key = None
        if self._layers is not None:
            self._layers.postpone(on=False)
        if split._marked:
            split._unmark()


# -- weight gradients that wait --------------------------------------------------------------------


class WeightGradient(ABC):
    """The deferred gradients of a layer's weights, mostly of one."""

    weights: Sequence[Any]
    """Parameters, always in the same order."""

    def fetch(self, buffer: str) -> None:  # noqa: B027 - mostly this rank has all operands
        """Start to gather an operand of several ranks, in Megatron's global memory `buffer`."""

    @abstractmethod
    def compute(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients; None: the GEMM kernel has accumulated it into `main_grad`."""


Record = Callable[[WeightGradient], None]
"""Stores a deferred gradient; called in the layer's backward."""

_EMBEDDING = "megatron_ext_is_embedding"


def mark_embedding(weight: torch.nn.Parameter) -> None:
    """Mark a weight as an embedding's, so that its gradient is never deferred."""
    # A stage may tie it to the output layer. Autograd sums the gradients of both uses in the
    # backward. Deferring one would add the two to `main_grad` separately and change the last bits.
    setattr(weight, _EMBEDDING, True)


def is_splittable(weight: torch.Tensor) -> bool:
    """Return whether a weight's gradient may be deferred."""
    # Not of embeddings, nor of weights computed from parameters, nor under Megatron's FSDP, whose
    # gradients have no memory of their own.
    return weight.is_leaf and not (hasattr(weight, _EMBEDDING) or hasattr(weight, "__fsdp_param__"))


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
    runtime: Any = None if stream is None else torch.get_device_module(stream.device)
    current: Any = None if runtime is None else runtime.current_stream(stream.device)
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
        _add(totals, products.pop().compute())
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


def _add(totals: list[torch.Tensor | None], gradients: Iterable[torch.Tensor | None]) -> None:
    """Add to each sum its gradient, if there is one."""
    for index, gradient in enumerate(gradients):
        total = totals[index]
        if gradient is not None:
            totals[index] = gradient if total is None else total.add_(gradient)


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


# Given a list `grad_output_buffer`, upstream's backward appends the output gradient and skips the
# weight gradient: upstream postpones that of the output layer to the end of the step this way. This
# class stands in for the list.
class _LinearGradient(WeightGradient):
    """`grad_output.t() @ input`, `[out, in]`; if `fused`, the kernel adds it to `main_grad`."""

    grad_output: torch.Tensor

    def __init__(
        self,
        record: Record,
        weight: Any,
        input_: torch.Tensor,
        gather_group: torch.distributed.ProcessGroup | None,
        fused: bool,
    ) -> None:
        self._record, self._fused = record, fused
        self.weights = (weight,)
        self.input = input_.detach()  # without its graph
        # Over which sequence parallelism splits the input; None if it is whole.
        self._gather_group = gather_group
        # The whole input `[s, b, h]`, and when it is there.
        self._gathered: tuple[torch.Tensor, torch.distributed.Work] | None = None
        self._autocast: AbstractContextManager[object] = nullcontext()

    def append(self, grad_output: torch.Tensor) -> None:
        """Record the deferred gradient; called by upstream's backward."""
        [weight] = self.weights
        if getattr(weight, "main_grad", self) is None:
            del weight.main_grad  # upstream's backward set it: no DDP, no such attribute
        self.grad_output = grad_output.detach()  # without its graph, which holds this object
        kind = grad_output.device.type
        # Upstream's product runs in its backward, under the autocast of the layer's forward.
        if torch.is_autocast_enabled(kind):
            self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind))
        self._unchanged = _Unchanged(self.input, grad_output)
        self._record(self)

    def fetch(self, buffer: str) -> None:
        """Start to gather the input, if it is split."""
        if self._gather_group is None:
            return
        size = [self.input.size(0) * self._gather_group.size(), *self.input.shape[1:]]
        whole = get_global_memory_buffer().get_tensor(size, self.input.dtype, buffer)
        arrival = layers.dist_all_gather_func(
            whole, self.input, group=self._gather_group, async_op=True
        )
        self._gathered = whole, arrival

    def compute(self) -> list[torch.Tensor | None]:
        """Return the gradient, or accumulate it if fused."""
        self._unchanged.check(self.input, self.grad_output)
        total_input = self.input
        if self._gathered is not None:
            total_input, arrival = self._gathered
            arrival.wait()
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            self.grad_output, total_input
        )
        if not self._fused:
            with self._autocast:
                product = torch.matmul(grad_output.t(), total_input)
            return [product.to(self.weights[0].dtype)]  # as autograd does
        main_grad = self.weights[0].main_grad
        kernels = layers.fused_weight_gradient_mlp_cuda
        if main_grad.dtype == torch.float32:
            kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
        else:
            kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
        return [None]


class _Returning(torch.autograd.Function):
    """Passes an output on; its backward, the first of the layer, brings back the layer's input."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: _LinearGradient) -> torch.Tensor:
        ctx.save_for_backward(gradient.input)  # Megatron offloads what autograd saves
        ctx.gradient = gradient
        del gradient.input  # Megatron frees its memory after the forward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ctx.gradient.input,) = ctx.saved_tensors
        return grad_output, None


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

    `call` is upstream's `linear_with_grad_accumulation_and_async_allreduce`, with its arguments.
    Weights that cannot be split (`is_splittable`) take upstream's path unchanged.
    """
    given = {**dict(zip(parameters(_LINEAR), args, strict=False)), **kwargs}
    weight, bias = given["weight"], given["bias"]
    if given.get("grad_output_buffer") is not None or not is_splittable(weight):
        return call(**given)
    group = None
    if given["sequence_parallel"]:
        group = get_tensor_model_parallel_group_if_none(given.get("tp_group"))
    # Upstream's backward skips the weight GEMM only with fusion on. If the user did not ask for
    # fusion, no fused kernel runs.
    fused = given["gradient_accumulation_fusion"]
    gradient = _LinearGradient(record, weight, given["input"], group, fused)
    given.update(
        bias=None,
        gradient_accumulation_fusion=True,
        grad_output_buffer=gradient,
        wgrad_deferral_limit=0,
    )
    output = call(**given)
    if is_offloading():
        output = _Returning.apply(output, gradient)
    return output if bias is None else _AddBias.apply(output, bias)


# -- grouped experts -------------------------------------------------------------------------------


class _GroupedGradient(WeightGradient):
    """The weight gradients of all experts, by the backward of `product`, the output of `gmm`."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        experts: torch.Tensor,
        product: torch.autograd.graph.GradientEdge,
        grad_output: torch.Tensor,
    ) -> None:
        self.weights, self.grad_output = (weight,), grad_output
        self._experts, self._product = experts, product
        self._unchanged = _Unchanged(grad_output)

    def compute(self) -> Sequence[torch.Tensor]:
        """Return the gradient."""
        self._unchanged.check(self.grad_output)
        return torch.autograd.grad(self._product, self._experts, self.grad_output)


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

    `tokens` are `[tokens, in]`, sorted by expert, and `experts` is a view of the parameter.
    """
    # Builds of grouped_gemm differ, so nothing of the library but its `ops.gmm` is called. The
    # weight gradient comes from `gmm`'s own backward, on a graph with the weights alone.
    weight = experts._base
    if weight is None or not is_splittable(weight) or not torch.is_grad_enabled():
        return gmm(tokens, experts, batch_sizes, trans_b=trans_b)
    product: torch.Tensor = _GroupedProduct.apply(
        tokens, experts, gmm, record, batch_sizes, trans_b
    )
    return product


# -- Transformer Engine ----------------------------------------------------------------------------


# A layer built with `delay_wgrad_compute` (`patches/split_backward.py`) queues the operands of its
# weight gradient, and `backward_dw` computes the oldest entry. Written against the sources of
# Transformer Engine 2.3 and later. Tested with stand-ins for its layers, and on the CPU with the
# layers of 2.20, whose kernels have not run: they need a GPU.


def overwrites_first(module: torch.nn.Module) -> bool:
    """Return whether layers of a chunk overwrite their weight gradients at a step's first batch."""
    return any(
        getattr(layer, "fuse_wgrad_accumulation", False)
        and getattr(layer, "is_first_microbatch", None) is not None
        and not getattr(layer, "disable_parameter_transpose_cache", False)
        for layer in module.modules()
    )


class PostponingLayers:
    """The layers of a stage that postpone their weight gradients themselves.

    Once registered here, the layers of its model chunk do so between `postpone(on=True)` and
    `postpone(on=False)` only, and hand to `put` what they queue: layer, operands, product. Without
    `put` they are left as they are.
    """

    def __init__(self, chunk: torch.nn.Module, put: Callable[..., None] | None) -> None:
        self.chunk = chunk
        self.overwrites_first = overwrites_first(chunk)
        self.layers: list[Any] = []
        if put is None:
            return
        for layer in chunk.modules():
            store: Any = getattr(layer, "wgrad_store", None)
            if store is None or store.context is None:
                continue  # not built to postpone
            store.disable_delay_wgrad_compute()
            if not _can_postpone(layer):
                continue
            self.layers.append(layer)
            store.put = partial(put, layer)

    def postpone(self, *, on: bool) -> None:
        """Let the layers postpone their weight gradients, or compute them in the backward."""
        for layer in self.layers:
            store = layer.wgrad_store
            (store.enable_delay_wgrad_compute if on else store.disable_delay_wgrad_compute)()


class _QueuedGradients(WeightGradient):
    """The entries of one layer in one micro-batch: one for each use of each of its weights."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.weights = _matrices(layer)
        # In place of the layer's own queue, which does not know micro-batches.
        self.entries: SimpleQueue[list[Any]] = SimpleQueue()

    def compute(self) -> list[torch.Tensor | None]:
        """Run the layer's `backward_dw`; return what it does not accumulate itself."""
        self._layer.wgrad_store.context = self.entries
        totals: list[torch.Tensor | None] = [None for _ in self.weights]
        # Without gradient accumulation fusion `backward_dw` leaves a gradient in `grad`, over what
        # is there: DDP's hook has fired in I.
        unfused = [] if self._layer.fuse_wgrad_accumulation else self.weights
        older = [weight.grad for weight in unfused]
        with _computing(self._layer):
            while not self.entries.empty():
                for weight in unfused:
                    weight.grad = None
                self._layer.backward_dw()  # one entry, or two in a layer with two weights
                _add(totals, [weight.grad for weight in unfused])
        for weight, gradient in zip(unfused, older, strict=True):
            weight.grad = gradient
        return totals


# Settings of a layer with --tp-comm-overlap whose operands may lie in a buffer that the backward of
# the next layer fills again.
_GATHERS_IN_USER_BUFFERS = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")


def _copied(operand: Any) -> Any:
    """Return an operand in memory of its own; a quantised one keeps its object."""
    if not hasattr(operand, "prepare_for_saving"):
        return operand.clone()
    tensors, holder = operand.prepare_for_saving()
    holder.restore_from_saved([None if one is None else one.clone() for one in tensors])
    return holder


def _into_new_memory(gradients: list[Any], product: Callable[..., Any]) -> Callable[..., Any]:
    """Let the product of a grouped layer take the memory of its gradients when it runs.

    Without gradient accumulation fusion the layer queues memory that nothing has filled, and hands
    the same list to autograd, which would add it up.
    """
    empty = partial(
        torch.empty, (len(gradients), *gradients[0].shape),
        dtype=gradients[0].dtype, device=gradients[0].device,
    )  # fmt: skip
    gradients[:] = [None] * len(gradients)

    def run(inputs: Any, grad_outputs: Any, _: Any) -> Any:
        gradients[:] = empty()  # one for each expert; `backward_dw` reads the list
        return product(inputs, grad_outputs, gradients)

    return run


def _matrices(layer: Any) -> list[Any]:
    """Return the weights whose gradients a layer postpones."""
    named = layer.named_parameters(recurse=False)
    return [one for name, one in named if "weight" in name and "layer_norm" not in name]


def _can_postpone(layer: Any) -> bool:
    """Return whether a layer's `backward_dw` sets the gradients of its own weights, and no more."""
    # Of several weights put together it would set the gradient of the copy. And of the experts'
    # weights as one parameter, autograd gets the gradient before W has filled it.
    several = len(getattr(layer, "weight_names", ())) > 1 and not hasattr(layer, "num_gemms")
    joined = several or getattr(layer, "single_grouped_weight", False)
    if joined and not layer.fuse_wgrad_accumulation:
        return False
    # DDP's hooks expect bias gradients in I. Most layers let Megatron add their bias, and then
    # autograd computes its gradient there. A layer that adds its bias itself (attention's QKV
    # projection) gets both gradients from one GEMM, so both stay in I (`te_leaves_whole`).
    if not getattr(layer, "use_bias", False):
        return True
    if hasattr(layer, "fc1_bias"):  # two weights; the first bias is never Megatron's
        return False
    return not layer.apply_bias or getattr(layer, "gemm_bias_unfused_add", False)


@contextmanager
def _computing(layer: Any) -> Iterator[None]:
    """Let `backward_dw` set gradients of weights, and none of biases."""
    # It does so for every bias without a `grad`, the normal state after DDP's hooks. It would fail,
    # because autograd has computed these gradients in I and the layer does not have them.
    named = layer.named_parameters(recurse=False)
    biases = [bias for name, bias in named if "bias" in name and bias.grad is None]
    for bias in biases:
        bias.grad = bias.detach()  # any tensor of that shape
    layer.wgrad_store.enable_delay_wgrad_compute()
    try:
        yield
    finally:
        layer.wgrad_store.disable_delay_wgrad_compute()
        for bias in biases:
            bias.grad = None
