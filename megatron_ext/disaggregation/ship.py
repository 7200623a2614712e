"""Ships layer inputs from forward ranks to backward ranks, which replay them.

With full uniform recomputation, a backward pass needs only each layer's input. A forward rank has
all of these inputs, so it sends them in one message, and its backward rank skips the stage's
forward pass. Instead, the backward rank builds the graph from the shipped layer outputs and
computes each layer when its backward pass runs, as in ordinary recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_ext.errors import ScheduleError


class Saved(NamedTuple):
    """Tensors from one forward pass that a forward rank keeps for shipping."""

    outputs: list[torch.Tensor]
    """Each layer's output, `[s, b, h]`."""
    generators: list[torch.Tensor]
    """Generator states before each layer, as uint8; empty if not needed."""


def layers_of(chunk: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return a stage's transformer layers. The chunk may be wrapped.

    Raises:
        ScheduleError: The model does not contain exactly one block of transformer layers.
    """
    blocks = [
        module for module in chunk.modules() if isinstance(module, TransformerBlock)
    ]
    if len(blocks) != 1:
        raise ScheduleError(
            f"--fbd-activations ship requires a model with one block of transformer layers, but "
            f"this one has {len(blocks)}; use --fbd-activations recompute"
        )
    return list(blocks[0].layers)


@contextmanager
def saving(
    layers: Iterable[torch.nn.Module],
    *,
    with_generators: bool,
) -> Iterator[Saved]:
    """Save the outputs of the layers that run inside the `with` block."""
    saved = Saved([], [])

    def before(_layer: torch.nn.Module, _inputs: Any) -> None:
        host, device, states = random._get_all_rng_states()
        # Sort by name: `Replay` splits the row in the same order.
        tracked = [states[name].cpu() for name in sorted(states)]
        row = torch.cat([host, device.cpu(), *tracked])
        saved.generators.append(row)

    def after(_layer: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        # Megatron's layers return (hidden states, context).
        if isinstance(outputs, tuple):
            outputs = outputs[0]
        saved.outputs.append(outputs)

    with ExitStack() as hooks:
        for layer in layers:
            after_hook = layer.register_forward_hook(after)
            hooks.callback(after_hook.remove)
            # With dropout, the backward rank must draw the same masks.
            if with_generators:
                before_hook = layer.register_forward_pre_hook(before)
                hooks.callback(before_hook.remove)
        yield saved


class Replay:
    """The layer outputs `[s, b, h]` for one micro-batch on a backward rank.

    The last layer's output is missing unless this is the last stage. With dropout, the outputs come
    with the generator states before each layer.
    """

    def __init__(
        self,
        outputs: Iterable[torch.Tensor],
        generators: Iterable[torch.Tensor] | None = None,
    ) -> None:
        self.num_replayed = 0
        """Number of layers replayed so far."""
        self._outputs = iter(outputs)
        self._generators: Iterator[torch.Tensor] | None = None
        if generators is not None:
            self._generators = iter(generators)

    def instead_of(
        self,
        function: Callable[..., Any],
        hidden_states: torch.Tensor,
    ) -> Callable[..., Any]:
        """Return a replacement for a layer's function that defers it to the backward pass."""
        self.num_replayed += 1
        output = next(self._outputs, None)
        if output is None:
            # This is the last layer's output. If another stage follows, nothing on this rank reads
            # it.
            output = torch.empty_like(hidden_states)
        if self._generators is not None:
            # Megatron's checkpoint saves the generator states now and restores them for
            # recomputation.
            _set_generators(next(self._generators))

        # Megatron's checkpoint runs this function twice. In the forward pass, without gradients, it
        # returns the shipped output. In the backward pass, with gradients, it computes the layer.
        def computed_later(*inputs: Any) -> Any:
            if torch.is_grad_enabled():
                return function(*inputs)
            # The block expects (hidden states, context).
            return output, inputs[2]

        return computed_later


def _set_generators(row: torch.Tensor) -> None:
    """Set all of Megatron's generators to the states in a uint8 row from `saving`."""
    host, device, tracked = random._get_all_rng_states()
    names = sorted(tracked)
    sizes = [len(host), len(device)]
    sizes += [len(tracked[name]) for name in names]
    # Clone the state, because a generator accepts only a state that has its own
    # storage.
    states = [state.clone() for state in row.cpu().split(sizes)]
    host, device, *tracked_states = states
    states_by_name = dict(zip(names, tracked_states, strict=True))
    random._set_all_rng_states(host, device, states_by_name)
