"""Checks that a model may run in slices: only attention, which keeps state, may mix tokens.

Megatron's own layers are known to be safe. Hooks and third-party modules may average over the
tokens they get, keep an output for the next call, or count calls; in slices, that would train a
different model. So they are rejected unless they declare `runs_in_slices = True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError

# Packages whose modules and hooks are known to treat each token separately, except in attention.
_KNOWN = frozenset({"apex", "megatron", "megatron_ext", "transformer_engine"})
# Modules of torch that do so, by the last part of their Python module's name.
_TORCHS = frozenset(
    {
        "activation",
        "container",
        "dropout",
        "linear",
        "module",
        "normalization",
        "sparse",
    }
)
_CONNECTING = (
    torch.nn.MultiheadAttention,
    torch.nn.GroupNorm,
    torch.nn.LocalResponseNorm,
)


def declares_slices(chunk: torch.nn.Module) -> bool:
    """Return whether a chunk's model declares that it runs in slices."""
    return bool(getattr(unwrap_model(chunk), "runs_in_slices", False))


def sliced_layers(chunk: torch.nn.Module) -> list[Any]:
    """Return the layers of a chunk's GPTModel, including multi-token prediction."""
    model = unwrap_model(chunk)
    predicting = model.mtp.modules() if getattr(model, "mtp_process", False) else ()
    return [
        *model.decoder.layers,
        *(m for m in predicting if isinstance(m, TransformerLayer)),
    ]


def check_model(chunk: torch.nn.Module) -> None:
    """Check a chunk's model at the first slice of a step, because hooks may change between steps.

    Raises:
        ScheduleError: Its results in slices may differ from those in whole micro-batches.
    """
    if declares_slices(chunk):
        return
    wrong = _wrong_layer(chunk)
    if wrong is not None:
        raise ScheduleError(
            f"slices are for a GPTModel with causal DotProductAttention, or Transformer Engine's, "
            f"in all layers, and for models that declare runs_in_slices (docs/lengths.md), not for "
            f"{wrong}; leave the slices out"
        )
    for name, stranger in _strangers(unwrap_model(chunk)):
        raise ScheduleError(
            f"{name} runs once for each slice, and may connect the tokens of a micro-batch; if it "
            f"treats each token by itself and keeps nothing, set runs_in_slices = True on "
            f"{stranger}, or leave the slices out"
        )


def _wrong_layer(chunk: torch.nn.Module) -> str | None:
    from megatron.core.models.gpt import (
        GPTModel,  # imported only for models that need it
    )

    model = unwrap_model(chunk)
    if type(model) is not GPTModel:
        return f"a {type(model).__name__}"
    for layer in sliced_layers(chunk):
        core: Any = getattr(
            getattr(layer, "self_attention", None), "core_attention", None
        )
        if type(core).__name__ not in ("DotProductAttention", "TEDotProductAttention"):
            return f"a layer with {type(core).__name__}"
        # Megatron uses an enum for the kinds of masks, Transformer Engine their names.
        if getattr(core.attn_mask_type, "name", core.attn_mask_type) != "causal":
            return "attention to later tokens"
        softmax = getattr(core, "scale_mask_softmax", None)
        if (
            softmax
            and softmax.scaled_masked_softmax_fusion
            and softmax.input_in_float16
        ):
            return (
                "the fused softmax in 16 bits, which takes as many queries as keys "
                "(masked_softmax_fusion=False)"
            )
    return None


def _strangers(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield hooks and modules that may mix tokens: a description, and what should declare it."""
    for hook in _hooks_of_all_modules():
        yield "a hook on all modules", f"the hook ({_name_of(hook)})"
    for path, module in model.named_modules():
        if ".parametrizations." in f".{path}.":
            continue  # they compute weights, which do not depend on tokens
        kind = type(module).__name__
        if not _is_known(module):
            yield f"{path} ({kind})", "the module"
        for hook in _hooks_of(module):
            yield f"a hook on {path} ({kind})", f"the hook ({_name_of(hook)})"
    for path, weight in model.named_parameters():
        for hook in _gradient_hooks_of(weight):
            yield f"a hook on the gradient of {path}", f"the hook ({_name_of(hook)})"


def _is_known(module: torch.nn.Module) -> bool:
    if getattr(module, "runs_in_slices", False):
        return True
    # Look at the forward, not at the class: a subclass may inherit its forward.
    place = _module_of(module.forward)
    if place.partition(".")[0] == "torch":
        return place.rpartition(".")[2] in _TORCHS and not isinstance(
            module, _CONNECTING
        )
    return place.partition(".")[0] in _KNOWN


def _hooks_of(module: torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks around a module's forward and backward that do not declare slices."""
    hooks = chain(
        module._forward_pre_hooks.values(),
        module._forward_hooks.values(),
        module._backward_pre_hooks.values(),
        module._backward_hooks.values(),
    )
    yield from filter(_is_strange, hooks)


def _hooks_of_all_modules() -> Iterator[Callable[..., Any]]:
    """Yield the hooks that torch runs around every module and that do not declare slices."""
    hooks = chain(
        torch_module._global_forward_pre_hooks.values(),
        torch_module._global_forward_hooks.values(),
        torch_module._global_backward_pre_hooks.values(),
        torch_module._global_backward_hooks.values(),
    )
    yield from filter(_is_strange, hooks)


def _gradient_hooks_of(weight: torch.nn.Parameter) -> Iterator[Callable[..., Any]]:
    before, after = (
        weight._backward_hooks,
        getattr(weight, "_post_accumulate_grad_hooks", None),
    )
    yield from filter(
        _is_strange, chain((before or {}).values(), (after or {}).values())
    )


def _is_strange(hook: Callable[..., Any]) -> bool:
    if getattr(hook, "runs_in_slices", False):
        return False
    return _module_of(hook).partition(".")[0] not in _KNOWN


def _module_of(function: Any) -> str:
    """Return the name of the Python module that defines a function or a `partial` of it."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def _name_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__name__)
