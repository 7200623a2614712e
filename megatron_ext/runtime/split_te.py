"""Transformer Engine's layers, which themselves queue the operands of weight gradients.

A layer built with `delay_wgrad_compute` (`patches/split_backward.py`) queues them, and
`backward_dw` computes the oldest entry. This is written against the sources of Transformer Engine
2.3 and later. It is tested with stand-ins for the layers, and on the CPU with the layers of 2.20,
but without running its kernels, which need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from megatron_ext.runtime.weight_gradients import WeightGradient, add_to


def overwrites_first(module: torch.nn.Module) -> bool:
    """Return whether a chunk's layers overwrite weight gradients in a step's first micro-batch."""
    return any(
        getattr(layer, "fuse_wgrad_accumulation", False)
        and getattr(layer, "is_first_microbatch", None) is not None
        and not getattr(layer, "disable_parameter_transpose_cache", False)
        for layer in module.modules()
    )


class PostponingLayers:
    """The layers of a stage that themselves postpone their weight gradients.

    Once registered here, the layers of the stage's chunk postpone only inside this object's
    context, and pass what they queue (layer, operands, product) to `put`. Without `put` they are
    left unchanged. `may_wait` is called with a layer's weights each time.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        put: Callable[[Any, list[Any], Callable[..., Any]], None] | None,
        may_wait: Callable[[Sequence[Any]], bool],
    ) -> None:
        self.overwrites_first = overwrites_first(chunk)
        self.layers: list[Any] = []
        self._may_wait = may_wait
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

    def __enter__(self) -> None:
        """Make the layers postpone their weight gradients, except those that something reads."""
        for layer in self.layers:
            if self._may_wait(_matrices(layer)):
                layer.wgrad_store.enable_delay_wgrad_compute()

    def __exit__(self, *_: object) -> None:
        """Make the layers compute their weight gradients in the backward again."""
        for layer in self.layers:
            layer.wgrad_store.disable_delay_wgrad_compute()


class TeGradients(WeightGradient):
    """A layer's queue entries for one micro-batch: one for each use of each of its weights."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.is_fused = layer.fuse_wgrad_accumulation
        self.weights = _matrices(layer)
        # Replaces the layer's own queue, which does not distinguish micro-batches.
        self._entries: SimpleQueue[list[Any]] = SimpleQueue()

    def put(self, operands: list[Any], product: Callable[..., Any]) -> None:
        """Add an entry, as the layer queues it."""
        if any(getattr(self._layer, name, False) for name in _GATHERS_IN_USER_BUFFERS):
            operands = [_copied(operand) for operand in operands]
        if not self.is_fused and isinstance(operands[-1], list):
            product = _into_new_memory(operands[-1], product)
        self._entries.put([operands, product])

    def compute(self) -> list[torch.Tensor | None]:
        """Run the layer's `backward_dw`; return gradients that it does not accumulate itself."""
        self._layer.wgrad_store.context = self._entries
        totals: list[torch.Tensor | None] = [None for _ in self.weights]
        # Without fusion, `backward_dw` overwrites `grad`.
        unfused = [] if self.is_fused else self.weights
        older = [weight.grad for weight in unfused]
        with _computing(self._layer):
            while not self._entries.empty():
                for weight in unfused:
                    weight.grad = None
                self._layer.backward_dw()  # takes one entry, or two in a layer with two weights
                add_to(totals, [weight.grad for weight in unfused])
        for weight, gradient in zip(unfused, older, strict=True):
            weight.grad = gradient
        return totals


# Settings of a layer, under --tp-comm-overlap, with which its operands may be in a buffer that the
# next layer's backward overwrites.
_GATHERS_IN_USER_BUFFERS = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")


def _copied(operand: Any) -> Any:
    """Copy an operand into separate memory; a quantised operand keeps its object."""
    if not hasattr(operand, "prepare_for_saving"):
        return operand.clone()
    tensors, holder = operand.prepare_for_saving()
    holder.restore_from_saved(
        [None if tensor is None else tensor.clone() for tensor in tensors]
    )
    return holder


def _into_new_memory(
    gradients: list[Any], product: Callable[..., Any]
) -> Callable[..., Any]:
    """Make the product of a grouped layer allocate its gradients only when it runs.

    Without gradient accumulation fusion the layer queues uninitialised memory, and passes the same
    list to autograd, which would accumulate it.
    """
    empty = partial(
        torch.empty, (len(gradients), *gradients[0].shape),
        dtype=gradients[0].dtype, device=gradients[0].device,
    )  # fmt: skip
    gradients[:] = [None] * len(gradients)

    def run(inputs: Any, grad_outputs: Any, _: Any) -> Any:
        gradients[:] = empty()  # one per expert; `backward_dw` reads the list
        return product(inputs, grad_outputs, gradients)

    return run


def _matrices(layer: Any) -> list[Any]:
    """Return the weights whose gradients a layer postpones."""
    named = layer.named_parameters(recurse=False)
    return [
        weight
        for name, weight in named
        if "weight" in name and "layer_norm" not in name
    ]


def _can_postpone(layer: Any) -> bool:
    """Return whether a layer's `backward_dw` sets only the gradients of the layer's weights."""
    # With several weights joined into a copy, it would set the copy's gradient. And if the experts'
    # weights are one parameter, autograd gets the gradient before W has filled it.
    has_parts = len(getattr(layer, "weight_names", ())) > 1 and not hasattr(
        layer, "num_gemms"
    )
    joined = has_parts or getattr(layer, "single_grouped_weight", False)
    if joined and not layer.fuse_wgrad_accumulation:
        return False
    # DDP's hooks expect bias gradients in I. Most layers let Megatron add their bias, so autograd
    # computes the bias gradient in I. A layer that adds its bias itself (attention's QKV
    # projection) gets both gradients from one GEMM, so both stay in I (`te_leaves_whole`).
    if not getattr(layer, "use_bias", False):
        return True
    if hasattr(layer, "fc1_bias"):  # two weights; Megatron never adds the first bias
        return False
    return not layer.apply_bias or getattr(layer, "gemm_bias_unfused_add", False)


@contextmanager
def _computing(layer: Any) -> Iterator[None]:
    """Make `backward_dw` set gradients of weights but not of biases."""
    # It sets a gradient for every bias whose `grad` is None, which is the normal state after DDP's
    # hooks. That would fail, because autograd computed these gradients in I and the layer does not
    # have them.
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
