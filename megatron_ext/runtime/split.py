"""Splits a stage's backward pass: I computes input gradients, W computes weight gradients.

A linear layer's backward pass consists of two GEMMs: the input gradient, which the previous stage
waits for, and the weight gradient, which is not needed until the optimizer step. A micro-batch's I
runs inside `SplitBackward.defer(stage, microbatch)`; its W is a call to
`SplitBackward.run(stage, microbatch)`. In between, both operands of each weight gradient are kept:
the layer's input and the gradient of its output. The result is bitwise identical to upstream's. The
idea comes from "Zero Bubble Pipeline Parallelism" (Qi et al., 2023).

The gradients of these weights are deferred to W: Column- and RowParallelLinear (`split_linear.py`:
attention, MLP, sequential experts, the output layer), grouped experts (`split_grouped.py`), and
Transformer Engine layers that are built to defer them (`split_te.py`). All other gradients stay in
I: embeddings, weights that are tied to an embedding on the same stage, norms, biases, the router.

Autograd does not know about gradients that are pending between I and W, so a weight's gradient is
deferred only if no other code needs it in between:

* Only the executor's backward pass defers. Any other backward pass, such as `torch.autograd.grad`
  inside a forward pass, computes all gradients.
* If a weight has hooks, its gradient is computed as a whole in I.
* If a deferred weight gets a gradient from another use in the same backward pass, that gradient
  also waits for W and is added to the product. From the next micro-batch on, the weight's gradient
  is computed as a whole.

Contract with the executor:

* The order of a stage's Ws affects the low-order bits of the results, and all ranks in a
  tensor-parallel group must run their Ws in the same order.
* A message's memory may be reused only after W, not after I.
* Split chunks stay in DDP's `no_sync` for the whole step (`runtime/sync.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding

from megatron_ext.config.active import report_departure
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.split_te import PostponingLayers, TeGradients
from megatron_ext.runtime.weight_gradients import (
    ArrivedGradient,
    WeightGradient,
    accumulate,
    accumulates,
    in_stream,
    stream_of_backward,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_Key = tuple[int, int]
Progress = Callable[[AbstractSet[int]], None]
"""Callback that takes the ids of the weights whose gradients have yet to be computed."""

# Megatron's buffer for gathered inputs, and a second buffer, so that a gather can write to one
# while a GEMM reads from the other.
_BUFFERS = ("mpu", "megatron_ext.mpu")
_EMBEDDING = "megatron_ext_is_embedding"
_HAS_HOOK = "a hook reads it"
_HAS_OTHER_USE = (
    "the weight is also used outside its layer (in this micro-batch, a sum of three or more "
    "gradients may round differently)"
)
_OTHER_RANK = "another tensor-parallel rank has to compute it in I"


class SplitBackward:
    """Keeps a configuration's deferred weight gradients, by stage and micro-batch."""

    def __init__(self) -> None:
        # A plain attribute: autograd runs CUDA backward passes in a separate thread, which does not
        # share thread-locals or context variables with the caller.
        self._key: _Key | None = None
        # Key -> id of a layer's first weight -> gradients. Both are kept in recording
        # order, because the order affects the low-order bits of the results.
        self._waiting: dict[_Key, dict[int, list[WeightGradient]]] = {}
        # Id of a layer's first weight -> stream that runs the layer's backward pass.
        self._streams: dict[int, Any] = {}
        self._prepared: list[_Prepared] = []
        # Stage -> its chunk.
        self._chunks: dict[int, _Chunk] = {}
        # Id of a weight with another use -> why its gradient is not deferred.
        self._shared: dict[int, str] = {}
        # Ids of weights whose gradients no rank in the tensor-parallel group defers in this step.
        self._agreed: set[int] = set()
        # Reason not yet logged -> weights; and the ids of the weights already logged.
        self._unlogged: dict[str, list[torch.Tensor]] = {}
        self._named: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._progress: Progress | None = None
        self.before_whole: Callable[[torch.Tensor], None] | None = None
        """Called in a backward pass that is about to compute a weight's gradient as a whole."""
        self.has_deferred = False
        """Whether any layer in this process has deferred a weight gradient to W."""
        self.is_in_use = False
        """Whether a table with split backward passes has run or will run."""

    @property
    def is_deferring(self) -> bool:
        """Whether the running backward pass is the executor's I."""
        return self._key is not None

    @property
    def overwrites_first(self) -> bool:
        """Whether layers overwrite their weight gradients in a step's first micro-batch."""
        return any(chunk.postponing.overwrites_first for chunk in self._chunks.values())

    @property
    def has_te_layers(self) -> bool:
        """Whether Transformer Engine's layers postpone weight gradients to W."""
        return any(chunk.postponing.layers for chunk in self._chunks.values())

    def close(self) -> None:
        """Remove the hooks from the weights, restore the layers and forget the chunks."""
        # Python cannot collect a reference cycle that passes through a weight's hook, because
        # autograd holds the hook. Unless the hooks are removed, the model and its process groups
        # stay in memory.
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for chunk in self._chunks.values():
            chunk.postponing.close()
        self._chunks.clear()
        self._waiting.clear()
        self.before_whole = None

    def register_modules(
        self,
        stage: int,
        chunk: torch.nn.Module,
        *,
        splits: bool = True,
    ) -> None:
        """Register a stage's model chunk: its embeddings and its Transformer Engine layers.

        Call this before every step; it returns immediately if the chunk is already registered.
        Without this call, Transformer Engine layers that the user made defer their weight gradients
        would never compute them. If no backward pass is split, Megatron controls these layers, as
        with `overlap_dispatch_backward_with_experts_wgrad`.
        """
        self.is_in_use = self.is_in_use or splits
        registered = self._chunks.get(stage)
        if registered is not None and registered.module is chunk:
            return
        if registered is not None:
            registered.postponing.close()
        postponing = PostponingLayers(
            chunk,
            put=self._put if splits else None,
            may_wait=self._may_wait_for_te,
        )
        weights = tuple(chunk.parameters())
        self._chunks[stage] = _Chunk(chunk, postponing, weights)
        for module in chunk.modules():
            # A stage may tie this weight to the output layer, and multi-token prediction uses both
            # several times. Autograd must sum the gradients in its own order, in a single backward
            # pass, so the weight is marked and not split.
            if isinstance(module, (VocabParallelEmbedding, torch.nn.Embedding)):
                setattr(module.weight, _EMBEDDING, True)

    def agree_on_whole_gradients(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Do not defer a weight's gradient if any tensor-parallel rank cannot defer it.

        Collective over the group, before a training step with sequence parallelism. The ranks must
        agree, because a layer gathers its input in W if the gradient is deferred, and in I
        otherwise.
        """
        weights: list[torch.nn.Parameter] = []
        for chunk in self._chunks.values():
            weights += chunk.weights
        reasons = [self._why_whole(weight) for weight in weights]
        flags = [reason is not None for reason in reasons]
        is_whole = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(is_whole, op=dist.ReduceOp.MAX, group=group)
        self._agreed.clear()
        for weight, reason, is_whole_anywhere in zip(
            weights,
            reasons,
            is_whole.tolist(),
            strict=True,
        ):
            if is_whole_anywhere:
                self._agreed.add(id(weight))
                self._say(weight, reason or _OTHER_RANK)
        self._log()

    def defer(self, stage: int, microbatch: int) -> _Deferral:
        """Return a context for I's backward pass, in which layers defer weight gradients to `run`.

        Use the context for this backward pass only: a nested one would miss its weight gradients.
        """
        layers = None
        chunk = self._chunks.get(stage)
        if chunk is not None and chunk.postponing.layers:
            layers = chunk.postponing
        return _Deferral(self, (stage, microbatch), layers)

    def postponing(self, stage: int) -> PostponingLayers | None:
        """Return a context for the forward pass of a split backward pass; None if not needed."""
        # Transformer Engine's layers decide in the forward pass whether to defer their weight
        # gradients.
        chunk = self._chunks.get(stage)
        if chunk is not None and chunk.postponing.layers:
            return chunk.postponing
        return None

    def may_wait(self, weight: torch.nn.Parameter, *, gathers: bool = False) -> bool:
        """Return whether a weight's gradient may wait for W; called from a layer within I.

        If it may not wait, this method accumulates the weight's earlier gradients now to preserve
        their order.

        Args:
            weight: A leaf.
            gathers: Whether the product needs a collective over the tensor-parallel group.

        Raises:
            ScheduleError: The weight has a hook that is missing on some tensor-parallel ranks.
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

    def _agreed_reason(
        self,
        weight: torch.nn.Parameter,
        reason: str | None,
    ) -> str | None:
        """Return why no tensor-parallel rank defers a weight's gradient, or None if all of them do.

        `reason` is this rank's current reason. Other ranks may have a different one, because hooks
        may differ between ranks and a rank may detect another use in the middle of a step.
        """
        if id(weight) in self._agreed:
            return reason or _OTHER_RANK
        if reason == _HAS_HOOK:
            raise ScheduleError(
                f"{self._name(weight)} got a new hook during a step, but --sequence-parallel "
                "requires tensor-parallel ranks to agree on the hooks when a step starts; register "
                "it between steps"
            )
        if reason == _HAS_OTHER_USE:
            return None
        return reason

    def record(self, gradient: WeightGradient) -> None:
        """Store a gradient that waits for W; called in a layer's backward pass in I."""
        assert self._key is not None, "layers record inside `defer` only"
        # The operands may be messages (a received gradient, or an activation that the first layer
        # uses directly), whose memory must stay valid until W.
        weight = gradient.weights[0]
        layer_id = id(weight)
        self.has_deferred = True
        waiting = self._waiting.setdefault(self._key, {})
        waiting.setdefault(layer_id, []).append(gradient)
        self._streams[layer_id] = stream_of_backward(weight)

    @contextmanager
    def reporting(self, progress: Progress) -> Iterator[None]:
        """Within this context, call `progress` before a W's first weight and after each weight."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = None

    def run(
        self,
        stage: int,
        microbatch: int,
        *,
        in_current_stream: bool = False,
    ) -> None:
        """Run W: compute a micro-batch's weight gradients and accumulate them.

        The gradients go into `main_grad`, or into `grad` without DDP. Operands are freed weight by
        weight. This does nothing for a stage without deferred weights.

        Args:
            stage: The stage.
            microbatch: The micro-batch.
            in_current_stream: Whether to compute in the current stream, so that the streams of the
                layers' backward passes do not wait for W. The caller must keep the operands' memory
                alive until W is complete.
        """
        waiting = self._waiting.pop((stage, microbatch), {})
        self._compute(waiting, in_current_stream=in_current_stream)

    def run_next(self, stage: int, microbatch: int) -> bool:
        """Run W for a single layer, and return whether other layers remain.

        Do not call this for layers whose gradients need a collective.
        """
        key = (stage, microbatch)
        waiting = self._waiting.get(key, {})
        if waiting:
            layer_id = next(iter(waiting))
            self._compute({layer_id: waiting.pop(layer_id)})
        if waiting:
            return True
        self._waiting.pop(key, None)
        return False

    def gradients(self, stage: int, microbatch: int) -> list[WeightGradient]:
        """Return a micro-batch's gradients that are waiting for W."""
        waiting = self._waiting.get((stage, microbatch), {})
        return list(chain.from_iterable(waiting.values()))

    def _compute(
        self,
        waiting: dict[int, list[WeightGradient]],
        *,
        in_current_stream: bool = False,
    ) -> None:
        remaining: set[int] = set()
        for gradients in waiting.values():
            remaining.update(map(id, gradients[0].weights))
        # With sequence parallelism, all-gather the inputs again, one gradient ahead of the GEMMs,
        # so that gathers and GEMMs overlap. The gather is collective, so all tensor-parallel ranks
        # on a stage must compute the same gradients in the same order.
        in_order = chain.from_iterable(waiting.values())
        to_fetch = deque(zip(in_order, cycle(_BUFFERS), strict=False))

        def fetch() -> None:
            if to_fetch:
                gradient, buffer = to_fetch.popleft()
                gradient.fetch(buffer)

        def report() -> None:
            if self._progress is not None:
                self._progress(remaining)

        report()
        fetch()
        for layer_id, gradients in waiting.items():
            weights = gradients[0].weights  # `accumulate` empties the list
            stream = None if in_current_stream else self._streams[layer_id]
            with in_stream(stream):
                accumulate(gradients, fetch)
            remaining.difference_update(map(id, weights))
            report()

    def _catch_up(self, weight: torch.Tensor) -> None:
        """Accumulate a weight's waiting gradients now, because its next gradient will not wait."""
        if self.before_whole is not None:
            self.before_whole(weight)
        layer_id = id(weight)
        for waiting in self._waiting.values():
            gradients = waiting.pop(layer_id, None)
            if gradients is not None:
                self._compute({layer_id: gradients})

    def waiting(self, stage: int, microbatch: int) -> frozenset[int]:
        """Return the ids of the weights whose gradients for a micro-batch wait for W."""
        weight_ids: set[int] = set()
        waiting = self._waiting.get((stage, microbatch), {})
        for gradients in waiting.values():
            weight_ids.update(map(id, gradients[0].weights))
        return frozenset(weight_ids)

    def pending(self) -> list[_Key]:
        """Return the (stage, micro-batch) keys whose W has not run, sorted."""
        return sorted(self._waiting)

    def clear(self) -> None:
        """Drop all deferred gradients after a failed step."""
        self._key = None
        self._waiting.clear()
        self.before_whole = None
        self._restore()

    # -- weights whose gradients are not deferred, or watched --------------------------------------

    def _why_whole(self, weight: torch.Tensor) -> str | None:
        """Return why a weight's gradient cannot be deferred now, or None if it can."""
        hooks = weight._backward_hooks
        if hooks:
            for hook in hooks.values():
                if type(hook) is not _Watch:
                    return _HAS_HOOK
        if weight._post_accumulate_grad_hooks:
            return _HAS_HOOK
        # With Megatron's FSDP, gradients do not have separate memory.
        if hasattr(weight, _EMBEDDING) or hasattr(weight, "__fsdp_param__"):
            return ""
        return self._shared.get(id(weight))

    def _may_wait_for_te(self, weights: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether a Transformer Engine layer's weight gradients may wait."""
        reasons = [self._why_whole(weight) for weight in weights]
        for weight, reason in zip(weights, reasons, strict=True):
            if reason is not None:
                self._say(weight, reason)
        all_may_wait = reasons.count(None) == len(reasons)
        # If a weight was frozen after its forward pass, autograd drops its gradient, but with
        # fusion the layer's own backward pass would still add it.
        may_wait = all_may_wait and all(weight.requires_grad for weight in weights)
        if not may_wait and self._key is not None:
            self._catch_up(weights[0])
        return may_wait

    def _watch(self, weight: torch.nn.Parameter, layer_id: int) -> None:
        """Hook a weight, so that `_arrived` gets the gradient that autograd is about to accumulate.

        `layer_id` is the key of the layer's gradients in `_waiting`.
        """
        hooks: dict[int, Any] = weight._backward_hooks or {}
        for hook in hooks.values():
            if isinstance(hook, _Watch) and hook.splits is self:
                return
        watch = _Watch(self, weight, layer_id)
        self._hooks.append(weight.register_hook(watch))

    def _arrived(
        self,
        watch: _Watch,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Handle a weight's gradient, as summed by autograd; the gradient may be None.

        Return the gradient that autograd should accumulate instead; None leaves it unchanged.
        """
        if self._key is None:
            return None
        weight = watch.weight()
        waiting = self._waiting.get(self._key, {}).get(watch.layer_id)
        if waiting is None or weight is None:
            return None
        if gradient is None or waiting[0].is_fused:
            # With fusion, the kernel adds the product to `main_grad`, and upstream makes DDP's hook
            # drop any other gradient.
            if hasattr(weight, "grad_added_to_main_grad"):
                self._prepare_for_ddp(weight, watch.nothing)
            return None
        if not accumulates(weight):  # `torch.autograd.grad` in a recomputation
            return None
        self._shared[id(weight)] = _HAS_OTHER_USE
        self._say(weight, _HAS_OTHER_USE)
        waiting.append(ArrivedGradient(waiting[0].weights, weight, gradient))
        self._prepare_for_ddp(weight, None)
        return torch.zeros_like(gradient)

    def _prepare_for_ddp(self, weight: Any, gradient: torch.Tensor | None) -> None:
        """Set `grad` until the end of I: DDP's hook, which runs next, requires it and drops it."""
        has_flag = hasattr(weight, "grad_added_to_main_grad")
        prepared = _Prepared(weight, weight.grad, has_flag)
        self._prepared.append(prepared)
        weight.grad = gradient
        if has_flag:
            weight.grad_added_to_main_grad = True

    def _restore(self) -> None:
        """Undo `_prepare_for_ddp`."""
        # If the flag remained set, DDP's hooks would drop gradients in backward passes
        # that are not split.
        for weight, gradient, has_flag in reversed(self._prepared):
            weight.grad = gradient
            if has_flag:
                weight.grad_added_to_main_grad = False
        self._prepared.clear()

    def _put(
        self,
        layer: Any,
        operands: list[Any],
        product: Callable[..., Any],
    ) -> None:
        """Store an entry that a Transformer Engine layer queues; replaces `WeightGradStore.put`."""
        gradient: Any = TeGradients(layer)
        weight = gradient.weights[0]
        # `torch.autograd.grad` for the layer's input needs no weight gradient.
        if not accumulates(weight):
            return
        if self._key is None:
            raise ScheduleError(
                f"a forward pass runs backward() through {self._name(weight)}, whose weight "
                "gradient is postponed; use torch.autograd.grad there, or a schedule that does not "
                "split backward passes, such as 1f1b"
            )
        layer_id = id(weight)
        waiting = self._waiting.get(self._key, {}).get(layer_id)
        if waiting is None:
            for parameter in gradient.weights:
                self._watch(parameter, layer_id)
            self.record(gradient)
        else:
            gradient = waiting[0]
        gradient.put(operands, product)

    # -- the log -----------------------------------------------------------------------------------

    def _say(self, weight: torch.Tensor, reason: str) -> None:
        """Queue one log entry per weight whose gradient is not deferred; skip empty reasons."""
        if reason and id(weight) not in self._named:
            self._named.add(id(weight))
            self._unlogged.setdefault(reason, []).append(weight)

    def _log(self) -> None:
        """Log the recorded weights on one replica."""
        if _is_first_replica():
            for reason, weights in self._unlogged.items():
                names = [self._name(weight) for weight in weights]
                report_departure(
                    f"weight gradient computed in I instead of W: {', '.join(names)}, because "
                    f"{reason}"
                )
        self._unlogged.clear()

    def _name(self, weight: torch.Tensor) -> str:
        for chunk in self._chunks.values():
            for name, parameter in chunk.module.named_parameters():
                if parameter is weight:
                    # Omit the prefixes of Megatron's two wrappers.
                    name_in_wrapper = name.removeprefix("module.")
                    return name_in_wrapper.removeprefix("module.")
        return f"a weight {list(weight.shape)}"


class _Chunk(NamedTuple):
    """A stage's model chunk."""

    module: torch.nn.Module
    postponing: PostponingLayers
    weights: tuple[torch.nn.Parameter, ...]
    """All parameters, in the same order on all tensor-parallel ranks."""


class _Prepared(NamedTuple):
    """A weight whose `grad` is set for DDP's hook."""

    weight: Any
    gradient: torch.Tensor | None
    """The weight's previous `grad`."""
    has_flag: bool
    """Whether DDP reads `grad_added_to_main_grad`."""


class _Watch:
    """The hook on a weight with deferred gradients."""

    __slots__ = ("layer_id", "nothing", "splits", "weight")

    def __init__(
        self,
        splits: SplitBackward,
        weight: torch.nn.Parameter,
        layer_id: int,
    ) -> None:
        self.splits = splits
        self.layer_id = layer_id
        self.weight = weakref.ref(weight)
        # A placeholder gradient for DDP's hook, which does not read its values.
        nothing = torch.zeros(
            (),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.nothing = nothing.expand(weight.shape)

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self.splits._arrived(self, gradient)


# This is a class because every I enters this context, and a generator-based context is slower.
class _Deferral:
    """The context of `defer`."""

    __slots__ = ("_key", "_layers", "_split")

    def __init__(
        self,
        split: SplitBackward,
        key: _Key,
        layers: PostponingLayers | None,
    ) -> None:
        self._split = split
        self._key = key
        self._layers = layers

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
    """Return whether this rank logs for all tensor- and data-parallel ranks on its stage."""
    if not parallel_state.model_parallel_is_initialized():
        return True
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return not replica and not parallel_state.get_tensor_model_parallel_rank()
