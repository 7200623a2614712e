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

from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import (
    get_tensor_model_parallel_group_if_none,
    prepare_input_tensors_for_wgrad_compute,
)

from megatron_ext.errors import ScheduleError
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
        self._waiting: dict[_Key, list[WeightGradient]] = {}
        self._marked: list[torch.nn.Parameter] = []
        # By id of a weight: the stream in which its layer runs backward.
        self._streams: dict[int, Any] = {}
        self._modules: dict[int, DelayedModules] = {}
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
        return any(modules.overwrites_first for modules in self._modules.values())

    def register_modules(self, stage: int, module: torch.nn.Module) -> None:
        """Register the model chunk of a stage, so that W reaches its Transformer Engine layers.

        Call it before each step; known chunks cost nothing. Without it, layers built to postpone
        their weight gradients would do so forever.
        """
        known = self._modules.get(stage)
        if known is None or known.module is not module:
            self._modules[stage] = DelayedModules(module)

    def defer(self, stage: int, microbatch: int) -> _Deferral:
        """Return a context in which layers defer their weight gradients to `run`.

        Enter it for the forward, where layers record the key, and again for the backward, which
        may rerun forwards (recomputation).
        """
        modules = self._modules.get(stage)
        postpones = modules is not None and bool(modules.weights)
        return _Deferral(self, (stage, microbatch), modules if postpones else None)

    def begin(self, key: _Key, modules: DelayedModules | None) -> None:
        """Enter the context of `defer`."""
        assert self._key is None, f"{key} inside {self._key}"
        self._key = key
        if modules is not None:
            self.has_deferred = True
            modules.begin(key[1])

    def end(self, modules: DelayedModules | None) -> None:
        """Leave the context of `defer`, also on error."""
        self._key = None
        if modules is not None:
            modules.end()
        if self._marked:
            self._unmark()

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

        Raises:
            ScheduleError: Transformer Engine's store is FIFO, and an older micro-batch comes first.
        """
        # By the id of the weight. Weights and gradients keep their order, which decides the bits.
        by_weight: dict[int, list[WeightGradient]] = {}
        for gradient in self._waiting.pop((stage, microbatch), []):
            by_weight.setdefault(id(gradient.weight), []).append(gradient)
        modules = self._modules.get(stage)
        remaining = set(by_weight)
        if modules is not None:
            remaining |= modules.weights

        def finished(*weights: int) -> None:
            remaining.difference_update(weights)
            if self._progress is not None:
                self._progress(remaining)

        # With sequence parallelism this all-gathers the inputs again, one gradient ahead of the
        # GEMMs, so that they overlap: a collective, so all tensor-parallel ranks of a stage compute
        # the same gradients in the same order.
        ahead = deque(zip(chain.from_iterable(by_weight.values()), cycle(_BUFFERS), strict=False))

        def fetch() -> None:
            if ahead:
                gradient, buffer = ahead.popleft()
                gradient.fetch(buffer)

        finished()
        fetch()
        for weight, gradients in by_weight.items():
            with in_stream(self._streams[weight]):
                accumulate(gradients, fetch)
            finished(weight)
        if modules is not None:
            modules.run(microbatch, finished)

    def pending(self) -> list[_Key]:
        """Return the (stage, micro-batch) keys whose W has not run, sorted."""
        of_modules = {(s, m) for s, modules in self._modules.items() for m in modules.waiting}
        return sorted(of_modules.union(self._waiting))

    def clear(self) -> None:
        """Drop all deferred gradients after a failed step."""
        self._key = None
        self._waiting.clear()
        self._unmark()
        for modules in self._modules.values():
            modules.clear()

    def _record(self, key: _Key, gradient: WeightGradient) -> None:
        # Its operands may be messages: a received gradient, or an activation that the first layer
        # uses directly. They stay until W.
        self.has_deferred = True
        self._waiting.setdefault(key, []).append(gradient)
        self._streams[id(gradient.weight)] = stream_of_backward(gradient.weight)
        self._marked.append(gradient.weight)

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

    __slots__ = ("_key", "_modules", "_split")

    def __init__(self, split: SplitBackward, key: _Key, modules: DelayedModules | None) -> None:
        self._split, self._key, self._modules = split, key, modules

    def __enter__(self) -> None:
        self._split.begin(self._key, self._modules)

    def __exit__(self, *_: object) -> None:
        self._split.end(self._modules)


# -- weight gradients that wait --------------------------------------------------------------------


class WeightGradient(Protocol):
    """A deferred weight-gradient GEMM."""

    weight: torch.nn.Parameter

    def fetch(self, buffer: str) -> None:
        """Start to gather an operand that other ranks have a part of, if there is one.

        It may take Megatron's global memory of the name `buffer`.
        """

    def compute(self) -> torch.Tensor | None:
        """Return the gradient; None: the GEMM kernel has accumulated it into `main_grad`."""


Record = Callable[[WeightGradient], None]
"""Stores a deferred gradient; called in the layer's backward."""

_EMBEDDING = "megatron_ext_is_embedding"


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
    """Compute one weight's deferred gradients, accumulate them and drop their operands.

    They go to `main_grad`, or to `grad` without DDP. `fetch` starts the gather of the operands of a
    later gradient, just before one is computed. `products` is empty afterwards.
    """
    weight = products[0].weight
    total: torch.Tensor | None = None
    # Unfused gradients are summed first, in the order of their records, and the sum is added once,
    # as autograd does for several uses of a weight in one backward: the same bits.
    products.reverse()
    while products:
        fetch()
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


# Given a list `grad_output_buffer`, upstream's backward appends the output gradient and skips the
# weight gradient: upstream postpones that of the output layer to the end of the step this way.
class _LinearGradient:
    """`grad_output.t() @ input`, computed as upstream does: `[out, in]`.

    Stands in for upstream's `grad_output_buffer` until the backward of the layer appends the output
    gradient. If `fused`, the GEMM kernel itself accumulates into `main_grad`.
    """

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
        self.weight = weight
        self.input = input_.detach()  # without its graph
        # Over which sequence parallelism splits the input; None if it is whole.
        self._gather_group = gather_group
        # The whole input `[s, b, h]`, and when it is there.
        self._gathered: tuple[torch.Tensor, torch.distributed.Work] | None = None

    def append(self, grad_output: torch.Tensor) -> None:
        """Record the deferred gradient; called by upstream's backward."""
        if getattr(self.weight, "main_grad", self) is None:
            del self.weight.main_grad  # upstream's backward set it: no DDP, no such attribute
        self.grad_output = grad_output.detach()  # without its graph, which holds this object
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

    def compute(self) -> torch.Tensor | None:
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
            return torch.matmul(grad_output.t(), total_input)
        main_grad = self.weight.main_grad
        kernels = layers.fused_weight_gradient_mlp_cuda
        if main_grad.dtype == torch.float32:
            kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
        else:
            kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
        return None


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


class _GroupedGradient:
    """The weight gradients of all experts, computed by the backward of the library's `gmm`.

    `experts` is a separate leaf that shares the weight's memory, and the only one that requires
    grad in the graph of `product`, the output of `gmm`.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        experts: torch.Tensor,
        product: torch.autograd.graph.GradientEdge,
        grad_output: torch.Tensor,
    ) -> None:
        self.weight, self.grad_output = weight, grad_output
        self._experts, self._product = experts, product
        self._unchanged = _Unchanged(grad_output)

    def fetch(self, buffer: str) -> None:
        """Do nothing: this rank has all operands."""

    def compute(self) -> torch.Tensor:
        """Return the gradient."""
        self._unchanged.check(self.grad_output)
        (gradient,) = torch.autograd.grad(self._product, self._experts, self.grad_output)
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

    Builds of grouped_gemm differ, so nothing of the library but its `ops.gmm` is called. The weight
    gradient comes from `gmm`'s own backward, on a graph that contains the weights alone. `tokens`
    are `[tokens, in]`, sorted by expert, and `experts` is a view of the parameter.
    """
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


class DelayedModules:
    """The layers of one stage that postpone their weight gradients themselves.

    Once registered here, the layers of its model chunk postpone between `begin` and `end` only.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.overwrites_first = overwrites_first(module)
        built: list[Any] = []
        for layer in module.modules():
            store: Any = getattr(layer, "wgrad_store", None)
            if store is not None and store.context is not None:  # built to postpone
                store.disable_delay_wgrad_compute()
                built.append(layer)
        self._layers = [layer for layer in reversed(built) if _can_postpone(layer)]
        self.weights = frozenset(weight for layer in self._layers for weight in _weights(layer))
        """Ids of the parameters of the layers that postpone."""
        self.waiting: dict[int, Counter[int]] = {}
        """By micro-batch whose W has not run, oldest first: queued entries by id of the layer."""
        self._microbatch = 0
        # By id of a layer: the stream in which it runs backward.
        self._streams: dict[int, Any] = {}
        for layer in self._layers:
            layer.wgrad_store.put = partial(self._put, layer)
        self._unfused = [
            weight
            for layer in self._layers
            if not layer.fuse_wgrad_accumulation
            for weight in _matrices(layer)
            if hasattr(weight, "main_grad")
        ]

    def begin(self, microbatch: int) -> None:
        """Let the layers postpone the weight gradients of a micro-batch."""
        self._microbatch = microbatch
        self._switch(on=True)
        for weight in self._unfused:
            # DDP's hooks fire in I, want a gradient and add it, unless it is added already.
            gradient = weight.main_grad.new_zeros((), dtype=weight.dtype)
            weight.grad, weight.grad_added_to_main_grad = gradient.expand(weight.shape), True

    def end(self) -> None:
        """Let the layers compute their weight gradients in the backward again."""
        self._switch(on=False)
        for weight in self._unfused:
            weight.grad, weight.grad_added_to_main_grad = None, False

    def _put(self, layer: Any, operands: list[Any], product: Callable[..., Any]) -> None:
        """Queue the operands of a weight gradient in place of `WeightGradStore.put`."""
        if any(getattr(layer, name, False) for name in _GATHERS_IN_USER_BUFFERS):
            operands = [_copied(operand) for operand in operands]
        self._streams[id(layer)] = stream_of_backward(next(layer.parameters()))
        type(layer.wgrad_store).put(layer.wgrad_store, operands, product)
        # The queues do not know micro-batches.
        self.waiting.setdefault(self._microbatch, Counter())[id(layer)] += 1

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            store = layer.wgrad_store
            (store.enable_delay_wgrad_compute if on else store.disable_delay_wgrad_compute)()

    def run(self, microbatch: int, finished: Callable[..., None]) -> None:
        """Compute a micro-batch's postponed weight gradients, last layer first.

        `finished` is called after each layer with the ids of its parameters.

        Raises:
            ScheduleError: TE's store is FIFO, and this is not the oldest micro-batch in it.
        """
        if microbatch not in self.waiting:
            return
        oldest = next(iter(self.waiting))
        if oldest != microbatch:
            raise ScheduleError(
                f"W of micro-batch {microbatch} comes before W of {oldest}, but Transformer Engine "
                f"computes weight gradients in the order of the backwards; use a schedule that "
                f"keeps this order, or --transformer-impl local"
            )
        queued = self.waiting.pop(microbatch)
        self._switch(on=True)
        try:
            for layer in self._layers:
                with in_stream(self._streams.get(id(layer))), _biases_are_done(layer):
                    _compute(layer, queued[id(layer)])
                finished(*_weights(layer))
        finally:
            self._switch(on=False)

    def clear(self) -> None:
        """Drop all queued operands."""
        self.waiting.clear()
        for layer in self._layers:
            with layer.wgrad_store.context.mutex:
                layer.wgrad_store.context.queue.clear()


def _compute(layer: Any, number: int) -> None:
    """Run a layer's `backward_dw` for so many entries of its queue.

    Without gradient accumulation fusion `backward_dw` leaves a gradient in `grad`, over what is
    there, and W adds it to `main_grad`: DDP's hook has fired in I.
    """
    weights = [] if layer.fuse_wgrad_accumulation else _matrices(layer)
    older = [weight.grad for weight in weights]
    # Summed first and added once, as autograd does for several uses of a weight: the same bits.
    totals: list[Any] = [None] * len(weights)
    queue = layer.wgrad_store.context
    remaining = queue.qsize() - number
    while queue.qsize() > remaining:
        for weight in weights:
            weight.grad = None
        layer.backward_dw()  # one entry, or two in a layer with two weights
        for index, weight in enumerate(weights):
            if weight.grad is not None:
                total = totals[index]
                totals[index] = weight.grad if total is None else total + weight.grad
    for weight, kept, total in zip(weights, older, totals, strict=True):
        main_grad = getattr(weight, "main_grad", None)
        weight.grad = kept
        if total is not None and main_grad is not None:
            main_grad.add_(total)
        elif total is not None:
            weight.grad = total if kept is None else kept + total


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


def _matrices(layer: Any) -> list[Any]:
    """Return the weights whose gradients a layer postpones."""
    named = layer.named_parameters(recurse=False)
    return [one for name, one in named if "weight" in name and "layer_norm" not in name]


def _weights(layer: Any) -> list[int]:
    return [id(parameter) for parameter in layer.parameters(recurse=False)]


def _can_postpone(layer: Any) -> bool:
    """Return whether a layer's `backward_dw` sets the gradients of its own weights, and no more."""
    # Of several weights put together it would set the gradient of the copy.
    several = len(getattr(layer, "weight_names", ())) > 1 and not hasattr(layer, "num_gemms")
    if several and not layer.fuse_wgrad_accumulation:
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
def _biases_are_done(layer: Any) -> Iterator[None]:
    """Keep `backward_dw` from setting bias gradients."""
    # It does so for every bias without a `grad`, the normal state after DDP's hooks. It would fail,
    # because autograd has computed these gradients in I and the layer does not have them.
    named = layer.named_parameters(recurse=False)
    biases = [bias for name, bias in named if "bias" in name and bias.grad is None]
    for bias in biases:
        bias.grad = bias.detach()  # any tensor of that shape
    try:
        yield
    finally:
        for bias in biases:
            bias.grad = None
