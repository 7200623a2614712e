"""Transformer Engine layers, which split their backward themselves.

A layer built with `delay_wgrad_compute` queues the operands of its weight gradient, and
`backward_dw` computes the oldest entry. This module enables that (`prepare_config`), switches it on
and off, and counts which queue entries belong to which micro-batch.

Written against the sources of Transformer Engine 2.3 and later. Tested with stand-ins for its
layers, and on the CPU with the layers of 2.20, whose kernels have not run: they need a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    import torch

__all__ = ["DelayedModules", "left_whole", "overwrites_first", "prepare_config", "why_not"]


def _uses_te(config: Any, *, here: bool = True) -> bool:
    """Return whether layers of Transformer Engine are built, here or where it is installed."""
    chosen = config.transformer_impl == "transformer_engine"
    return chosen and (not here or find_spec("transformer_engine") is not None)


def prepare_config(config: Any) -> None:
    """Make Transformer Engine's layers postpone their weight gradients to W.

    Call it after creating the `TransformerConfig` and before building the model. Without
    Transformer Engine it changes nothing.
    """
    if _uses_te(config):
        # Megatron allows it only together with its own overlap of expert communication, and checks
        # that when a configuration is created.
        config.delay_wgrad_compute = True
        # A reduce-scatter under W would hold back what I is for.
        config.tp_comm_bulk_wgrad = False


def why_not(config: Any, *, here: bool = True) -> str | None:
    """Return why Transformer Engine's layers cannot be split as configured, or None.

    Args:
        config: A `TransformerConfig`, or arguments with the same names.
        here: Whether the layers are built in this process, with what is installed.
    """
    if not _uses_te(config, here=here):
        return None
    if here:
        from megatron.core.utils import get_te_version, is_te_min_version

        if not is_te_min_version("2.3.0"):
            return (
                f"Transformer Engine {get_te_version()} cannot postpone weight gradients; use 2.3 "
                "or later, or --transformer-impl local"
            )
    return None


def left_whole(config: Any, *, here: bool = True) -> str | None:
    """Return which weight gradients of Transformer Engine's layers stay in I, and why, or None.

    Args:
        config: See `why_not`.
        here: See `why_not`.
    """
    if not _uses_te(config, here=here) or config.multi_latent_attention:
        return None
    if not config.add_bias_linear and not config.add_qkv_bias:
        return None
    return (
        "weight gradients of the projections to queries, keys and values are computed in I, "
        "because Transformer Engine computes them together with those of the biases; "
        "--disable-bias-linear without --add-qkv-bias moves them to W"
    )


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

    Once registered here, they postpone inside `delaying` only.

    Args:
        module: The stage's model chunk.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        built: list[Any] = []
        for layer in module.modules():
            store: Any = getattr(layer, "wgrad_store", None)
            if store is not None and store.context is not None:  # built to postpone
                store.disable_delay_wgrad_compute()
                built.append(layer)
        # DDP's hooks expect bias gradients in I. Most layers let Megatron add their bias, and then
        # autograd computes its gradient there. A layer that adds its bias itself (attention's QKV
        # projection) gets both gradients from one GEMM, so both stay in I (`left_whole`).
        self._layers = [
            layer
            for layer in reversed(built)
            if not _adds_its_bias(layer) and not _loses_its_parts(layer)
        ]
        self.weights = frozenset(weight for layer in self._layers for weight in _weights(layer))
        """Ids of the parameters of the layers that postpone."""
        self._counted = [0] * len(self._layers)
        self._notes: deque[tuple[int, list[int]]] = deque()
        self._streams: dict[int, Any] = {}
        """By id of a layer: the stream in which it runs backward."""
        for layer in self._layers:
            layer.wgrad_store.put = partial(self._put, layer)
        self._unfused = [
            weight
            for layer in self._layers
            if not layer.fuse_wgrad_accumulation
            for weight in _matrices(layer)
            if hasattr(weight, "main_grad")
        ]

    @property
    def is_empty(self) -> bool:
        """Whether no layer of the stage postpones anything."""
        return not self._layers

    @contextmanager
    def delaying(self) -> Iterator[None]:
        """Return a context in which the layers postpone their weight gradients."""
        self._switch(on=True)
        for weight in self._unfused:
            # DDP's hooks fire in I, want a gradient and add it, unless it is added already.
            gradient = weight.main_grad.new_zeros((), dtype=weight.dtype)
            weight.grad, weight.grad_added_to_main_grad = gradient.expand(weight.shape), True
        try:
            yield
        finally:
            self._switch(on=False)
            for weight in self._unfused:
                weight.grad, weight.grad_added_to_main_grad = None, False

    def _put(self, layer: Any, operands: list[Any], product: Callable[..., Any]) -> None:
        """Queue the operands of a weight gradient in place of `WeightGradStore.put`."""
        from megatron_ext.runtime.weight_gradients import stream_of_backward

        if any(getattr(layer, name, False) for name in _GATHERS_IN_USER_BUFFERS):
            operands = [_copied(operand) for operand in operands]
        self._streams[id(layer)] = stream_of_backward(next(layer.parameters()))
        type(layer.wgrad_store).put(layer.wgrad_store, operands, product)

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            store = layer.wgrad_store
            (store.enable_delay_wgrad_compute if on else store.disable_delay_wgrad_compute)()

    def note(self, microbatch: int) -> None:
        """Attribute the entries queued since the last call to this micro-batch."""
        # The queues do not know micro-batches, but each `defer` ends with this call. With pairs
        # there is a `defer` for each part of a layer.
        sizes = [_queued(layer) for layer in self._layers]
        added = [size - counted for size, counted in zip(sizes, self._counted, strict=True)]
        if not any(added):
            return
        self._counted = sizes
        if self._notes and self._notes[-1][0] == microbatch:
            added = [sum(both) for both in zip(self._notes.pop()[1], added, strict=True)]
        self._notes.append((microbatch, added))

    def run(self, microbatch: int, finished: Callable[..., None]) -> None:
        """Compute a micro-batch's postponed weight gradients, last layer first.

        Args:
            microbatch: 0 to m-1.
            finished: Called after each layer with the ids of its parameters.

        Raises:
            ScheduleError: TE's store is FIFO, and this is not the oldest micro-batch in it.
        """
        if not any(noted == microbatch for noted, _ in self._notes):
            return
        oldest, counts = self._notes[0]
        if oldest != microbatch:
            raise ScheduleError(
                f"W of micro-batch {microbatch} comes before W of {oldest}, but Transformer Engine "
                f"computes weight gradients in the order of the backwards; use a schedule that "
                f"keeps this order, or --transformer-impl local"
            )
        self._notes.popleft()
        self._counted = [all_ - now for all_, now in zip(self._counted, counts, strict=True)]
        from megatron_ext.runtime.weight_gradients import in_stream

        self._switch(on=True)
        try:
            for layer, remaining in zip(self._layers, self._counted, strict=True):
                with in_stream(self._streams.get(id(layer))), _biases_are_done(layer):
                    _compute(layer, remaining)
                finished(*_weights(layer))
        finally:
            self._switch(on=False)

    def waiting(self) -> list[int]:
        """Return the micro-batches whose W has not run, oldest first."""
        return [microbatch for microbatch, _ in self._notes]

    def clear(self) -> None:
        """Drop all queued operands."""
        self._notes.clear()
        self._counted = [0] * len(self._layers)
        for layer in self._layers:
            with layer.wgrad_store.context.mutex:
                layer.wgrad_store.context.queue.clear()


def _compute(layer: Any, remaining: int) -> None:
    """Run a layer's `backward_dw` until so many entries are left in its queue.

    Without gradient accumulation fusion `backward_dw` leaves a gradient in `grad`, over what is
    there, and W adds it to `main_grad`: DDP's hook has fired in I.
    """
    weights = [] if layer.fuse_wgrad_accumulation else _matrices(layer)
    older = [weight.grad for weight in weights]
    # Summed first and added once, as autograd does for several uses of a weight: the same bits.
    totals: list[Any] = [None] * len(weights)
    while _queued(layer) > remaining:
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


_GATHERS_IN_USER_BUFFERS = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")
"""Settings of a layer with --tp-comm-overlap whose operands may lie in a buffer that the backward
of the next layer fills again."""


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


def _adds_its_bias(layer: Any) -> bool:
    """Whether one GEMM yields the gradients of both bias and weight."""
    if not getattr(layer, "use_bias", False):
        return False
    if hasattr(layer, "fc1_bias"):  # two weights; the first bias is never Megatron's
        return True
    return bool(layer.apply_bias) and not getattr(layer, "gemm_bias_unfused_add", False)


def _loses_its_parts(layer: Any) -> bool:
    """Whether `backward_dw` sets the gradient of a copy, put together of several weights."""
    several = len(getattr(layer, "weight_names", ())) > 1 and not hasattr(layer, "num_gemms")
    return several and not layer.fuse_wgrad_accumulation


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


def _queued(layer: Any) -> int:
    return int(layer.wgrad_store.context.qsize())
