"""Splits a stage's backward: I computes input gradients, W computes weight gradients.

The backward of a linear layer is two GEMMs: the input gradient, which the previous stage waits for,
and the weight gradient, which is not needed before the optimizer step. I of a micro-batch runs
inside `SplitBackward.defer(stage, microbatch)`; W is `SplitBackward.run(stage, microbatch)`. In
between, the two operands of each weight gradient are kept: the layer's input and the gradient of
its output. The result is bitwise equal to upstream's backward. The idea comes from "Zero Bubble
Pipeline Parallelism" (Qi et al., 2023).

Deferred to W: the weights of Column- and RowParallelLinear (`split_linear.py`: attention, MLP,
sequential experts, the output layer), grouped experts (`split_grouped.py`), and Transformer Engine
layers built for it (`split_te.py`). Everything else stays in I: embeddings and weights tied to one
on the same stage, norms, biases, the router.

Between I and W a gradient exists that autograd does not know, so a weight waits only while nothing
else looks at its gradient:

* Only the executor's own backward defers: any other, such as `torch.autograd.grad` in a forward,
  gets real gradients.
* A weight with hooks is left whole, for as long as it has them.
* If a deferred weight gets a gradient from another use in the same backward, that gradient waits
  for W, too, and is added to the product. From the next micro-batch on the weight is left whole.

Contract with the executor:

* The order of a stage's Ws decides the last bits, and all ranks of a tensor-parallel group run
  their Ws in the same order.
* Message memory may be reused after W, not after I.
* Split chunks stay in DDP's `no_sync` for the whole step (`runtime/sync.py`).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain, cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding

from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.split_te import PostponingLayers, TeGradients
from megatron_ext.runtime.weight_gradients import (
    ArrivedGradient,
    WeightGradient,
    accumulate,
    accumulator_of,
    in_stream,
    stream_of_backward,
    will_accumulate,
)

_LOG = logging.getLogger(__name__)
_Key = tuple[int, int]
Progress = Callable[[AbstractSet[int]], None]
"""Callback with the ids of the weights whose gradients remain to be computed."""

# Megatron's memory for gathered inputs, and a second one, which a gather writes while a GEMM reads
# the first.
_BUFFERS = ("mpu", "megatron_ext.mpu")
_EMBEDDING = "megatron_ext_is_embedding"
_HAS_HOOK = "a hook reads it"
_HAS_OTHER_USE = (
    "something else than its layer uses the weight, too (in this micro-batch a sum of three or "
    "more gradients may round differently)"
)
_OTHER_RANK = "another tensor-parallel rank must"


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
        self._prepared: list[_Prepared] = []
        self._chunks: dict[int, _Chunk] = {}
        # Why a weight with another use is left whole, by id.
        self._shared: dict[int, str] = {}
        # Ids of the weights that all ranks of a tensor-parallel group leave whole in this step.
        self._agreed: set[int] = set()
        # Reasons that the log does not name yet, and ids of the weights that it names.
        self._unlogged: dict[str, list[torch.Tensor]] = {}
        self._named: set[int] = set()
        self._progress: Progress | None = None
        self.has_deferred = False
        """Whether any layer of this process has left a weight gradient to W."""
        self.is_in_use = False
        """Whether a table with split backwards has run, or will."""

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that runs now is the executor's I."""
        return self._key is not None

    @property
    def overwrites_first(self) -> bool:
        """Whether layers overwrite their weight gradients at a step's first micro-batch."""
        return any(chunk.postponing.overwrites_first for chunk in self._chunks.values())

    def register_modules(self, stage: int, chunk: torch.nn.Module, *, splits: bool = True) -> None:
        """Register the model chunk of a stage: its embeddings, its Transformer Engine layers.

        Call it before each step; known chunks cost nothing. Without it, Transformer Engine layers
        that are built to postpone their weight gradients would do so forever. Where no backward
        splits they are Megatron's own matter, as with
        `overlap_dispatch_backward_with_experts_wgrad`.
        """
        self.is_in_use = self.is_in_use or splits
        registered = self._chunks.get(stage)
        if registered is not None and registered.module is chunk:
            return
        put = self._put if splits else None
        postponing = PostponingLayers(chunk, put, may_wait=self._may_wait_for_te)
        self._chunks[stage] = _Chunk(chunk, postponing, tuple(chunk.parameters()))
        for module in chunk.modules():
            # A stage may tie its weight to the output layer, which multi-token prediction uses
            # several times, as it does the embedding: a sum in autograd's order, in one backward.
            if isinstance(module, (VocabParallelEmbedding, torch.nn.Embedding)):
                setattr(module.weight, _EMBEDDING, True)

    def agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Leave those weights whole that any tensor-parallel rank must leave whole in this step.

        Collective over the group, before a training step with sequence parallelism. A weight that
        is left whole gathers its layer's input in I, a deferred one in W.
        """
        weights = [weight for chunk in self._chunks.values() for weight in chunk.weights]
        reasons = [self._why_whole(weight) for weight in weights]
        flags = [reason is not None for reason in reasons]
        is_whole = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(is_whole, op=dist.ReduceOp.MAX, group=group)
        self._agreed.clear()
        for weight, reason, anywhere in zip(weights, reasons, is_whole.tolist(), strict=True):
            if anywhere:
                self._agreed.add(id(weight))
                self._say(weight, reason or _OTHER_RANK)
        self._log()

    def defer(self, stage: int, microbatch: int) -> _Deferral:
        """Return a context for the backward of I, in which layers leave weight gradients to `run`.

        It is for this backward alone: any other one within would lose the gradients it asks for.
        """
        chunk = self._chunks.get(stage)
        layers = chunk.postponing if chunk and chunk.postponing.layers else None
        return _Deferral(self, (stage, microbatch), layers)

    def postponing(self, stage: int) -> PostponingLayers | None:
        """Return the context for the forward of a split backward; None: it needs none."""
        # Transformer Engine's layers decide in the forward.
        chunk = self._chunks.get(stage)
        return chunk.postponing if chunk and chunk.postponing.layers else None

    def may_wait(self, weight: torch.nn.Parameter, *, gathers: bool = False) -> bool:
        """Return whether the gradient of a weight may wait for W, in a layer's backward in I.

        If not, earlier gradients of the weight are accumulated now, so that they keep their order.

        Args:
            weight: A leaf.
            gathers: Whether the product needs a collective over the tensor-parallel group.

        Raises:
            ScheduleError: The weight has a hook that not all of its tensor-parallel ranks know of.
        """
        reason = self._why_whole(weight)
        if gathers:
            reason = self._agreed_reason(weight, reason)
        if reason is None:
            self._watch(weight, id(weight))
            return True
        self._say(weight, reason)
        self._catch_up(weight)
        return False

    def _agreed_reason(self, weight: torch.nn.Parameter, reason: str | None) -> str | None:
        """Return why a weight is left whole on all of its tensor-parallel ranks; None: it is not.

        `reason` is that of this rank now. Other ranks may not have it: hooks may differ between
        ranks, and a rank learns of another use in the middle of a step.
        """
        if id(weight) in self._agreed:
            return reason or _OTHER_RANK
        if reason == _HAS_HOOK:
            raise ScheduleError(
                f"{self._name(weight)} got a hook during a step, but with --sequence-parallel its "
                "tensor-parallel ranks must know of hooks when a step begins; register it between "
                "steps"
            )
        if reason == _HAS_OTHER_USE:
            return None
        return reason

    def record(self, gradient: WeightGradient) -> None:
        """Take a gradient that waits for W; called in a layer's backward in I."""
        assert self._key is not None, "layers record inside `defer` only"
        # Its operands may be messages: a received gradient, or an activation that the first layer
        # uses directly. They stay until W.
        weight = gradient.weights[0]
        self.has_deferred = True
        self._waiting.setdefault(self._key, {}).setdefault(id(weight), []).append(gradient)
        self._streams[id(weight)] = stream_of_backward(weight)

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
        self._compute(self._waiting.pop((stage, microbatch), {}))

    def _compute(self, waiting: dict[int, list[WeightGradient]]) -> None:
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

    def _catch_up(self, weight: torch.Tensor) -> None:
        """Accumulate what waits of a weight: its next gradient does not wait, and comes after."""
        for waiting in self._waiting.values():
            gradients = waiting.pop(id(weight), None)
            if gradients is not None:
                self._compute({id(weight): gradients})

    def waiting(self, stage: int, microbatch: int) -> frozenset[int]:
        """Return the ids of the weights whose gradients of a micro-batch wait for W."""
        gradients_of = self._waiting.get((stage, microbatch), {})
        return frozenset(
            id(weight) for gradients in gradients_of.values() for weight in gradients[0].weights
        )

    def pending(self) -> list[_Key]:
        """Return the (stage, micro-batch) keys whose W has not run, sorted."""
        return sorted(self._waiting)

    def clear(self) -> None:
        """Drop all deferred gradients after a failed step."""
        self._key = None
        self._waiting.clear()
        self._restore()

    # -- weights that are left whole, or watched ---------------------------------------------------

    def _why_whole(self, weight: torch.Tensor) -> str | None:
        """Return why a weight's gradient may not wait now; None: it may."""
        for hook in (weight._backward_hooks or {}).values():
            if type(hook) is not _Watch:
                return _HAS_HOOK
        if weight._post_accumulate_grad_hooks:
            return _HAS_HOOK
        # The gradients of Megatron's FSDP have no memory of their own.
        if hasattr(weight, _EMBEDDING) or hasattr(weight, "__fsdp_param__"):
            return ""
        return self._shared.get(id(weight))

    def _may_wait_for_te(self, weights: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether the gradients of a Transformer Engine layer may wait."""
        reasons = [self._why_whole(weight) for weight in weights]
        for weight, reason in zip(weights, reasons, strict=True):
            if reason is not None:
                self._say(weight, reason)
        may_wait = reasons.count(None) == len(reasons)
        if not may_wait and self._key is not None:
            self._catch_up(weights[0])
        return may_wait

    def _watch(self, weight: torch.nn.Parameter, layer_id: int) -> None:
        """Let `_arrived` see what autograd is about to accumulate into a weight's gradient.

        Its layer's gradients wait under `layer_id`.
        """
        hooks: dict[int, Any] = weight._backward_hooks or {}
        for hook in hooks.values():
            if hook.splits is self:
                return
        weight.register_hook(_Watch(self, weight, layer_id))

    def _arrived(self, watch: _Watch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See the sum of the gradients that autograd has for a weight; None: it has none.

        Return what autograd shall accumulate in its place; None: no change.
        """
        if self._key is None:
            return None
        weight = watch.weight()
        waiting = self._waiting.get(self._key, {}).get(watch.layer_id)
        if waiting is None or weight is None:
            return None
        if gradient is None or waiting[0].is_fused:
            # Under fusion upstream, too, lets DDP's hook drop what is not in the kernel's product.
            if hasattr(weight, "grad_added_to_main_grad"):
                self._prepare_for_ddp(weight, watch.nothing)
            return None
        if not will_accumulate(accumulator_of(weight)):  # `torch.autograd.grad` in a recomputation
            return None
        self._shared[id(weight)] = _HAS_OTHER_USE
        self._say(weight, _HAS_OTHER_USE)
        waiting.append(ArrivedGradient(waiting[0].weights, weight, gradient))
        self._prepare_for_ddp(weight, None)
        return torch.zeros_like(gradient)

    def _prepare_for_ddp(self, weight: Any, gradient: torch.Tensor | None) -> None:
        """Set `grad` until the end of I: DDP's hook, which runs next, wants one, and drops it."""
        has_flag = hasattr(weight, "grad_added_to_main_grad")
        self._prepared.append(_Prepared(weight, weight.grad, has_flag))
        weight.grad = gradient
        if has_flag:
            weight.grad_added_to_main_grad = True

    def _restore(self) -> None:
        """Undo `_prepare_for_ddp`."""
        # A flag left set would make the hooks drop the gradients of unsplit backwards.
        for weight, gradient, has_flag in reversed(self._prepared):
            weight.grad = gradient
            if has_flag:
                weight.grad_added_to_main_grad = False
        self._prepared.clear()

    def _put(self, layer: Any, operands: list[Any], product: Callable[..., Any]) -> None:
        """Take what a Transformer Engine layer queues, in place of `WeightGradStore.put`."""
        gradient: Any = TeGradients(layer)
        weight = gradient.weights[0]
        if not will_accumulate(accumulator_of(weight)):
            return  # `torch.autograd.grad` for the layer's input
        if self._key is None:
            raise ScheduleError(
                f"a forward runs backward() through {self._name(weight)}, which leaves its weight "
                "gradient for later; use torch.autograd.grad there, or a schedule that does not "
                "split backwards, such as 1f1b"
            )
        waiting = self._waiting.get(self._key, {}).get(id(weight))
        if waiting is None:
            for parameter in gradient.weights:
                self._watch(parameter, id(weight))
            self.record(gradient)
        else:
            gradient = waiting[0]
        gradient.put(operands, product)

    # -- the log -----------------------------------------------------------------------------------

    def _say(self, weight: torch.Tensor, reason: str) -> None:
        """Let the log name a weight that is left whole, once; an empty reason is nothing to say."""
        if reason and id(weight) not in self._named:
            self._named.add(id(weight))
            self._unlogged.setdefault(reason, []).append(weight)

    def _log(self) -> None:
        """Log the weights that are newly left whole, on one of their replicas."""
        if _is_first_replica():
            for reason, weights in self._unlogged.items():
                names = ", ".join(self._name(weight) for weight in weights)
                _LOG.warning(
                    "weight gradient computed in I, not left to W: %s, because %s", names, reason
                )
        self._unlogged.clear()

    def _name(self, weight: torch.Tensor) -> str:
        for chunk in self._chunks.values():
            for name, parameter in chunk.module.named_parameters():
                if parameter is weight:
                    return name.removeprefix("module.").removeprefix("module.")
        return f"a weight {list(weight.shape)}"


class _Chunk(NamedTuple):
    """The model chunk of a stage."""

    module: torch.nn.Module
    postponing: PostponingLayers
    weights: tuple[torch.nn.Parameter, ...]
    """All parameters, in the same order on all tensor-parallel ranks."""


class _Prepared(NamedTuple):
    """A weight whose `grad` is set for DDP's hook."""

    weight: Any
    gradient: torch.Tensor | None
    """Its `grad` before."""
    has_flag: bool
    """Whether DDP reads `grad_added_to_main_grad`."""


class _Watch:
    """The hook on a weight whose gradients wait."""

    __slots__ = ("layer_id", "nothing", "splits", "weight")

    def __init__(self, splits: SplitBackward, weight: torch.nn.Parameter, layer_id: int) -> None:
        self.splits, self.layer_id = splits, layer_id
        self.weight = weakref.ref(weight)
        # A gradient for DDP's hook, which does not read it.
        nothing = torch.zeros((), dtype=weight.dtype, device=weight.device)
        self.nothing = nothing.expand(weight.shape)

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self.splits._arrived(self, gradient)


# A class, not a generator, which costs more: every I enters it.
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
            self._layers.__enter__()

    def __exit__(self, *_: object) -> None:
        split = self._split
        split._key = None
        if self._layers is not None:
            self._layers.__exit__()
        if split._prepared:
            split._restore()
        if split._unlogged:
            split._log()


def _is_first_replica() -> bool:
    """Return whether this rank speaks for the tensor- and data-parallel ranks of its stage."""
    if not parallel_state.model_parallel_is_initialized():
        return True
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return not replica and not parallel_state.get_tensor_model_parallel_rank()
