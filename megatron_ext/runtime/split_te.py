"""Transformer Engine's layers, which queue the operands of their weight gradients themselves.

A layer built with `delay_wgrad_compute` queues the operands, and `backward_dw` computes the oldest
entry. If `patches/split_backward.py` has set it, the layer starts switched off, and only
`PostponingLayers` switches it on, around a pass that is split. This module is based on the source
code of Transformer Engine 2.3 and later and is tested with fake layers and, on the CPU, with
Transformer Engine 2.20's layers, but not with its kernels, which need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from megatron_ext.runtime.weight_gradients import WeightGradient, add_to

_Product = Callable[..., Any]
"""Computes the weight gradients of one use of a layer from its operands."""
_Put = Callable[[Any, list[Any], _Product], None]
"""Takes a layer, its operands and their product."""


def overwrites_first(module: torch.nn.Module) -> bool:
    """Return whether a chunk's layers overwrite weight gradients in a step's first micro-batch."""
    for layer in module.modules():
        is_fused = getattr(layer, "fuse_wgrad_accumulation", False)
        # The setting that makes Megatron pass `is_first_microbatch=None` in every call.
        ignores_first = getattr(layer, "disable_parameter_transpose_cache", False)
        knows_first = getattr(layer, "is_first_microbatch", None) is not None
        if is_fused and knows_first and not ignores_first:
            return True
    return False


class PostponingLayers:
    """A stage's layers that defer their weight gradients themselves.

    Until `close`, the layers in the stage's chunk defer only inside this object's context and pass
    queue entries (layer, operands, product) to `put`. If `put` is None, the layers are unchanged:
    any that are switched on are the user's, whose schedule computes their weight gradients.
    `may_wait` takes a layer's weights and is called each time the context is entered.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        put: _Put | None,
        may_wait: Callable[[Sequence[Any]], bool],
    ) -> None:
        self.overwrites_first = overwrites_first(chunk)
        self.layers: list[Any] = []
        self._may_wait = may_wait
        self._originals: list[_Original] = []
        if put is None:
            return
        for layer in chunk.modules():
            store: Any = getattr(layer, "wgrad_store", None)
            is_built_to_defer = store is not None and store.context is not None
            if not is_built_to_defer:
                continue
            original = _Original(store, store.context, store.delay_wgrad_compute())
            self._originals.append(original)
            store.disable_delay_wgrad_compute()
            if _can_postpone(layer):
                self.layers.append(layer)
                store.put = partial(put, layer)

    def close(self) -> None:
        """Restore the layers for other schedules and forget them."""
        for store, queue, is_on in self._originals:
            # Otherwise the layer's next entries would go to a closed `SplitBackward`.
            vars(store).pop("put", None)
            store.context = queue
            if is_on:
                store.enable_delay_wgrad_compute()
            else:
                store.disable_delay_wgrad_compute()
        self._originals.clear()
        self.layers.clear()

    def __enter__(self) -> None:
        """Make the layers defer their weight gradients, except where `may_wait` forbids it."""
        for layer in self.layers:
            if self._may_wait(_matrices(layer)):
                layer.wgrad_store.enable_delay_wgrad_compute()

    def __exit__(self, *_: object) -> None:
        """Make the layers compute their weight gradients in the backward pass again."""
        for layer in self.layers:
            layer.wgrad_store.disable_delay_wgrad_compute()


class _Original(NamedTuple):
    """A layer's store as it was before a `PostponingLayers`."""

    store: Any
    queue: Any
    is_on: bool
    """Whether the layer deferred in every backward pass."""


class TeGradients(WeightGradient):
    """A layer's queue entries for a micro-batch, one per use of each weight."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.is_fused = layer.fuse_wgrad_accumulation
        self.weights = _matrices(layer)
        # Replaces the layer's own queue, which does not distinguish micro-batches.
        self._entries: SimpleQueue[list[Any]] = SimpleQueue()

    def put(self, operands: list[Any], product: _Product) -> None:
        """Add an entry in the format of the layer's own queue."""
        layer = self._layer
        if any(getattr(layer, name, False) for name in _GATHERS_IN_USER_BUFFERS):
            operands = [_copied(operand) for operand in operands]
        gradients = operands[-1]
        if not self.is_fused and isinstance(gradients, list):
            product = _into_new_memory(gradients, product)
        self._entries.put([operands, product])

    def compute(self) -> list[torch.Tensor | None]:
        """Run the layer's `backward_dw`; return gradients that it does not accumulate itself."""
        layer = self._layer
        layer.wgrad_store.context = self._entries
        totals: list[torch.Tensor | None] = [None for _ in self.weights]
        # Without fusion, `backward_dw` overwrites `grad`, so save and restore it.
        unfused = [] if self.is_fused else self.weights
        older_gradients = [weight.grad for weight in unfused]
        with _computing(layer):
            while not self._entries.empty():
                for weight in unfused:
                    weight.grad = None
                layer.backward_dw()  # takes one entry, or two for a layer with two weights
                add_to(totals, [weight.grad for weight in unfused])
        for weight, older_gradient in zip(unfused, older_gradients, strict=True):
            weight.grad = older_gradient
        return totals


# Layer settings (from --tp-comm-overlap). If any of them is on, an operand may be in a
# buffer that the next layer's backward pass overwrites.
_GATHERS_IN_USER_BUFFERS = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")


def _copied(operand: Any) -> Any:
    """Copy an operand into separate memory; a quantised operand keeps its object."""
    if not hasattr(operand, "prepare_for_saving"):
        return operand.clone()
    tensors, holder = operand.prepare_for_saving()
    copies = []
    for tensor in tensors:
        copy = None
        if tensor is not None:
            copy = tensor.clone()
        copies.append(copy)
    holder.restore_from_saved(copies)
    return holder


def _into_new_memory(gradients: list[Any], product: _Product) -> _Product:
    """Make a grouped layer's product allocate its gradients only when it runs.

    Without gradient accumulation fusion, the layer queues uninitialised memory and passes the same
    list to autograd, which would accumulate the uninitialised values.
    """
    first = gradients[0]
    allocate = partial(
        torch.empty,
        (len(gradients), *first.shape),
        dtype=first.dtype,
        device=first.device,
    )
    gradients[:] = [None] * len(gradients)

    def run(inputs: Any, grad_outputs: Any, _: Any) -> Any:
        gradients[:] = allocate()  # one per expert; `backward_dw` reads the list
        return product(inputs, grad_outputs, gradients)

    return run


def _matrices(layer: Any) -> list[Any]:
    """Return the weights whose gradients a layer defers."""
    matrices = []
    for name, weight in layer.named_parameters(recurse=False):
        if "weight" in name and "layer_norm" not in name:
            matrices.append(weight)
    return matrices


def _can_postpone(layer: Any) -> bool:
    """Return whether a layer's `backward_dw` sets gradients, and only those of its weights."""
    # Megatron's `backward_dw` does nothing without this setting, which a host or `deactivate` may
    # have restored since the layer was built.
    config = getattr(layer, "config", None)
    if not getattr(config, "delay_wgrad_compute", True):
        return False
    # If the layer joins several weights into a copy, `backward_dw` would set the copy's
    # gradient. If the experts' weights form a single parameter, autograd would get the
    # gradient before W has filled it.
    is_grouped = hasattr(layer, "num_gemms")
    num_weights = len(getattr(layer, "weight_names", ()))
    has_parts = num_weights > 1 and not is_grouped
    is_joined = has_parts or getattr(layer, "single_grouped_weight", False)
    if is_joined and not layer.fuse_wgrad_accumulation:
        return False
    # DDP's hooks expect bias gradients in I. For most layers, Megatron adds the bias, so autograd
    # computes its gradient in I. A layer that adds its bias itself (attention's QKV projection)
    # computes both gradients with one GEMM, so both stay in I (`te_leaves_whole`).
    if not getattr(layer, "use_bias", False):
        return True
    if hasattr(layer, "fc1_bias"):  # two weights; Megatron never adds the first bias
        return False
    return not layer.apply_bias or getattr(layer, "gemm_bias_unfused_add", False)


@contextmanager
def _computing(layer: Any) -> Iterator[None]:
    """Make `backward_dw` set the gradients of weights but not those of biases."""
    # `backward_dw` sets a gradient for every bias whose `grad` is None, as is the case
    # after DDP's hooks. That would fail: autograd has already computed these gradients
    # in I, and the layer cannot access them.
    biases = []
    for name, bias in layer.named_parameters(recurse=False):
        if "bias" in name and bias.grad is None:
            bias.grad = bias.detach()  # any tensor of that shape
            biases.append(bias)
    layer.wgrad_store.enable_delay_wgrad_compute()
    try:
        yield
    finally:
        layer.wgrad_store.disable_delay_wgrad_compute()
        for bias in biases:
            bias.grad = None
