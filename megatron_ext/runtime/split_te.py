"""Transformer Engine's layers, which queue the operands of their weight gradients themselves.

A layer built with `delay_wgrad_compute` (`patches/split_backward.py`) queues them, and
`backward_dw` computes the oldest entry. Written against the sources of Transformer Engine 2.3 and
later. Tested with stand-ins for its layers, and on the CPU with the layers of 2.20, whose kernels
have not run: they need a GPU.
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
    """Return whether layers of a chunk overwrite their weight gradients at a step's first batch."""
    return any(
        getattr(layer, "fuse_wgrad_accumulation", False)
        and getattr(layer, "is_first_microbatch", None) is not None
        and not getattr(layer, "disable_parameter_transpose_cache", False)
        for layer in module.modules()
    )


class PostponingLayers:
    """The layers of a stage that postpone their weight gradients themselves.

    Once registered here, the layers of its model chunk do so only inside of the context that this
    object is, and hand to `put` what they queue: layer, operands, product. Without `put` they are
    left as they are. `may_wait` is asked for the weights of a layer each time.
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
        """Let the layers postpone their weight gradients, except where something reads them."""
        for layer in self.layers:
            if self._may_wait(_matrices(layer)):
                layer.wgrad_store.enable_delay_wgrad_compute()

    def __exit__(self, *_: object) -> None:
        """Let the layers compute their weight gradients in the backward."""
        for layer in self.layers:
            layer.wgrad_store.disable_delay_wgrad_compute()


class TeGradients(WeightGradient):
    """The entries of one layer in one micro-batch: one for each use of each of its weights."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.is_fused = layer.fuse_wgrad_accumulation
        self.weights = _matrices(layer)
        # In place of the layer's own queue, which does not know micro-batches.
        self._entries: SimpleQueue[list[Any]] = SimpleQueue()

    def put(self, operands: list[Any], product: Callable[..., Any]) -> None:
        """Add an entry, as the layer queues it."""
        if any(getattr(self._layer, name, False) for name in _GATHERS_IN_USER_BUFFERS):
            operands = [_copied(operand) for operand in operands]
        if not self.is_fused and isinstance(operands[-1], list):
            product = _into_new_memory(operands[-1], product)
        self._entries.put([operands, product])

    def compute(self) -> list[torch.Tensor | None]:
        """Run the layer's `backward_dw`; return what it does not accumulate itself."""
        self._layer.wgrad_store.context = self._entries
        totals: list[torch.Tensor | None] = [None for _ in self.weights]
        # Without fusion `backward_dw` overwrites `grad`.
        unfused = [] if self.is_fused else self.weights
        older = [weight.grad for weight in unfused]
        with _computing(self._layer):
            while not self._entries.empty():
                for weight in unfused:
                    weight.grad = None
                self._layer.backward_dw()  # one entry, or two in a layer with two weights
                add_to(totals, [weight.grad for weight in unfused])
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
    holder.restore_from_saved([None if tensor is None else tensor.clone() for tensor in tensors])
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
    return [weight for name, weight in named if "weight" in name and "layer_norm" not in name]


def _can_postpone(layer: Any) -> bool:
    """Return whether a layer's `backward_dw` sets the gradients of its own weights, and no more."""
    # Of several weights put together it would set the gradient of the copy. And of the experts'
    # weights as one parameter, autograd gets the gradient before W has filled it.
    has_parts = len(getattr(layer, "weight_names", ())) > 1 and not hasattr(layer, "num_gemms")
    joined = has_parts or getattr(layer, "single_grouped_weight", False)
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
