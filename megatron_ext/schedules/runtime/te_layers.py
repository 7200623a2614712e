"""Layers of Transformer Engine, which split their backward themselves.

A layer that was built with `delay_wgrad_compute` puts the operands of its weight gradient into a
queue of its own, and its `backward_dw` works off the oldest entry. Megatron asks for that only
together with its own overlap of expert communication and checks this when the configuration is
made; `prepare_config` asks later. Here the layers are told when to postpone, and which entries
belong to which micro-batch is counted.

Written against the sources of Transformer Engine 2.3 and later. It was tested with stand-ins for
its layers, not with the library, which needs CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    import torch

__all__ = ["DelayedModules", "prepare_config", "why_not"]


def _uses_te(config: Any) -> bool:
    return (
        config.transformer_impl == "transformer_engine"
        and find_spec("transformer_engine") is not None
    )


def prepare_config(config: Any) -> None:
    """Make Transformer Engine's layers leave their weight gradients for W.

    To be called between the making of a `TransformerConfig` and of the model. Without Transformer
    Engine it changes nothing.
    """
    if _uses_te(config):
        config.delay_wgrad_compute = True


def why_not(config: Any) -> str | None:
    """Return why the layers of Transformer Engine cannot be split as configured, or None."""
    if not _uses_te(config):
        return None
    from megatron.core.utils import get_te_version, is_te_min_version

    if not is_te_min_version("2.3.0"):
        return (
            f"Transformer Engine {get_te_version()} cannot postpone weight gradients; use 2.3 or "
            f"later, or --transformer-impl local"
        )
    if not config.gradient_accumulation_fusion:
        return (
            "Transformer Engine's postponed weight gradients reach main_grad only with gradient "
            "accumulation fusion; leave out --no-gradient-accumulation-fusion, or use "
            "--transformer-impl local"
        )
    if config.add_bias_linear or config.add_qkv_bias:
        return (
            "Transformer Engine postpones the gradients of biases too, which DDP does not expect; "
            "use --disable-bias-linear without --add-qkv-bias, or --transformer-impl local"
        )
    if config.tp_comm_overlap:
        return (
            "Transformer Engine does not postpone weight gradients with --tp-comm-overlap; leave "
            "it out, or use --transformer-impl local"
        )
    return None


class DelayedModules:
    """The layers of one stage that postpone their weight gradients themselves.

    From here on they do so inside of `delaying` only.

    Args:
        module: The model chunk of the stage.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._layers: list[Any] = [m for m in module.modules() if _delays(m)]
        self._switch(on=False)
        self._counted = [0] * len(self._layers)
        self._notes: deque[tuple[int, list[int]]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no layer of the stage postpones anything."""
        return not self._layers

    @contextmanager
    def delaying(self) -> Iterator[None]:
        """Let the layers postpone."""
        self._switch(on=True)
        try:
            yield
        finally:
            self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            store = layer.wgrad_store
            (store.enable_delay_wgrad_compute if on else store.disable_delay_wgrad_compute)()

    def note(self, microbatch: int) -> None:
        """Count what the layers have put aside since the last note, for this micro-batch."""
        sizes = [_queued(layer) for layer in self._layers]
        added = [size - counted for size, counted in zip(sizes, self._counted, strict=True)]
        if any(added):
            self._counted = sizes
            self._notes.append((microbatch, added))

    def run(self, microbatch: int) -> None:
        """Let the layers compute what they put aside for a micro-batch.

        Raises:
            ScheduleError: It is not the oldest one, which is the only one that they can compute.
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
        with self.delaying():
            for layer, remaining in zip(self._layers, self._counted, strict=True):
                while _queued(layer) > remaining:
                    layer.backward_dw()  # takes one entry, or the two of a layer with two weights

    def waiting(self) -> list[int]:
        """Return the micro-batches whose W has not run, oldest first."""
        return [microbatch for microbatch, _ in self._notes]

    def clear(self) -> None:
        """Drop everything that was put aside."""
        self._notes.clear()
        self._counted = [0] * len(self._layers)
        for layer in self._layers:
            with layer.wgrad_store.context.mutex:
                layer.wgrad_store.context.queue.clear()


def _delays(module: Any) -> bool:
    """Whether a layer was built to postpone; it may be switched off at the moment."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.context is not None


def _queued(layer: Any) -> int:
    return int(layer.wgrad_store.context.qsize())
