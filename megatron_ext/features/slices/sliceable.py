"""Checks that a model can run in slices: only attention, which keeps state, may mix tokens.

Megatron's own layers are known to be safe. Hooks and third-party modules may average over the
tokens they receive, keep an output for the next call, or count calls. With slices, that would train
a different model, so they are rejected unless they declare `runs_in_slices = True`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError
from megatron_ext.features.slices.slice_inputs import READ_POSITIONS
from megatron_ext.runtime.module_calls import (
    KNOWN,
    Function,
    hooks_of,
    hooks_of_all_modules,
    is_of_program,
    module_of,
    name_of,
    program_calls_of,
    wrappers_around,
)

# Files in torch.nn.modules whose modules process each token separately, except for `_CONNECTING`.
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
# Defined in `activation` and `normalization`, but these mix the tokens they receive.
_CONNECTING = (
    torch.nn.MultiheadAttention,
    torch.nn.GroupNorm,
    torch.nn.LocalResponseNorm,
)


def declares_slices(chunk: torch.nn.Module) -> bool:
    """Return whether a chunk's model declares that it can run in slices."""
    return bool(getattr(unwrap_model(chunk), "runs_in_slices", False))


def sliced_layers(chunk: torch.nn.Module) -> list[Any]:
    """Return the layers in a chunk's GPTModel, including multi-token prediction layers."""
    model = unwrap_model(chunk)
    layers = list(model.decoder.layers)
    if getattr(model, "mtp_process", False):
        for module in model.mtp.modules():
            if isinstance(module, TransformerLayer):
                layers.append(module)
    return layers


def fields_beyond_tokens(chunk: torch.nn.Module) -> tuple[str, ...]:
    """Return the data fields that a chunk needs and cannot derive from a slice's tokens.

    Positions computed from the tokens would start at 0 in every slice, and labels would lack the
    next slice's first token. Models that declare `runs_in_slices` may use different data.
    """
    if declares_slices(chunk):
        return ()
    model = unwrap_model(chunk)
    names = []
    embedding_type = getattr(model, "position_embedding_type", None)
    is_first = getattr(model, "pre_process", False)
    if is_first and embedding_type in READ_POSITIONS:
        names.append("position_ids")
    if getattr(model, "post_process", False):
        names.append("labels")
    return tuple(names)


def declared_fields(forward_step: Any) -> tuple[str, ...]:
    """Return the names of the data fields `[b, s]` that a forward step declares.

    Programs set `forward_step.fields_along_sequence`, for example for per-token advantages.
    Wrappers made with `functools` are unwrapped.
    """
    return tuple(_declared(forward_step, "fields_along_sequence", ()))


def changes_each_token(forward_step: Any) -> bool:
    """Return whether a forward step declares that it changes every token of its data separately.

    Programs set `forward_step.runs_in_slices`, for example to mask labels in the forward step.
    """
    return bool(_declared(forward_step, "runs_in_slices", False))


def _declared(forward_step: Any, name: str, default: Any) -> Any:
    while not hasattr(forward_step, name):
        if isinstance(forward_step, partial):
            forward_step = forward_step.func
        elif hasattr(forward_step, "__wrapped__"):
            forward_step = forward_step.__wrapped__
        else:
            return default
    return getattr(forward_step, name)


def check_model(chunk: torch.nn.Module) -> None:
    """Check that a chunk's model can run in slices.

    Call this in every step, because hooks may change between steps.

    Raises:
        ScheduleError: The model may compute different results in slices than in micro-batches.
    """
    if declares_slices(chunk):
        return
    wrong = _wrong_layer(chunk)
    if wrong is not None:
        raise ScheduleError(
            f"slices need a GPTModel with Megatron's or Transformer Engine's causal "
            f"DotProductAttention in all layers, or a model that declares runs_in_slices "
            f"(docs/lengths.md), not {wrong}; disable slices"
        )
    for name, stranger in _strangers(chunk):
        raise ScheduleError(
            f"{name} runs once per slice, but may mix the tokens of a micro-batch; if it "
            f"processes each token separately and keeps no state, set runs_in_slices = True on "
            f"{stranger}; otherwise, disable slices"
        )


def _wrong_layer(chunk: torch.nn.Module) -> str | None:
    # Imported here because models that declare `runs_in_slices` do not need it.
    from megatron.core.models.gpt import GPTModel

    model = unwrap_model(chunk)
    # A subclass may change the forward pass, so accept only this exact class.
    if type(model) is not GPTModel:
        return f"a {type(model).__name__}"
    for layer in sliced_layers(chunk):
        attention = getattr(layer, "self_attention", None)
        core: Any = getattr(attention, "core_attention", None)
        if type(core).__name__ not in ("DotProductAttention", "TEDotProductAttention"):
            return f"a layer with {type(core).__name__}"
        # Megatron uses an enum for mask types; Transformer Engine uses names.
        mask_type = core.attn_mask_type
        if getattr(mask_type, "name", mask_type) != "causal":
            return "attention to later tokens"
        softmax = getattr(core, "scale_mask_softmax", None)
        if (
            softmax
            and softmax.scaled_masked_softmax_fusion
            and softmax.input_in_float16
        ):
            return (
                "the fused softmax in 16 bits, which requires as many queries as keys "
                "(masked_softmax_fusion=False)"
            )
    return None


def _strangers(chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield hooks and modules that may mix tokens, and functions around modules.

    Each result consists of a description and the object on which the user can set `runs_in_slices`.
    """
    for hook in _undeclared(hook for _, hook in hooks_of_all_modules()):
        yield "a hook on all modules", f"the hook ({name_of(hook)})"
    for wrapper in wrappers_around(chunk):
        yield from _attached_to(type(wrapper).__name__, wrapper)
    model = unwrap_model(chunk)
    for path, module in model.named_modules():
        # Parametrizations compute weights, which do not depend on tokens.
        if ".parametrizations." in f".{path}.":
            continue
        kind = type(module).__name__
        title = f"{path} ({kind})"
        if not _is_known(module):
            yield title, "the module"
        yield from _attached_to(title, module)
    for path, weight in model.named_parameters():
        for hook in _undeclared(_gradient_hooks_of(weight)):
            yield f"a hook on the gradient of {path}", f"the hook ({name_of(hook)})"


def _attached_to(title: str, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a module's hooks and the functions that wrap its calls; see `_strangers`."""
    for hook in _undeclared(hooks_of(module)):
        yield f"a hook on {title}", f"the hook ({name_of(hook)})"
    if getattr(module, "runs_in_slices", False):
        return
    for method in (module.forward, type(module).__call__):
        for function in _undeclared(program_calls_of(method)):
            yield f"a function around {title}", f"the function ({name_of(function)})"


def _is_known(module: torch.nn.Module) -> bool:
    if getattr(module, "runs_in_slices", False):
        return True
    # Decide by the `forward` method instead of the class, because a subclass may inherit it.
    place = module_of(module.forward)
    package = place.partition(".")[0]
    if package == "torch":
        file_name = place.rpartition(".")[2]
        return file_name in _TORCHS and not isinstance(module, _CONNECTING)
    return package in KNOWN


def _gradient_hooks_of(weight: torch.nn.Parameter) -> Iterator[Function]:
    # Such a hook would run once per slice instead of once per micro-batch.
    before = weight._backward_hooks or {}
    after = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    hooks = chain(before.values(), after.values())
    yield from filter(is_of_program, hooks)


def _undeclared(functions: Iterable[Function]) -> Iterator[Function]:
    """Yield the functions that do not declare `runs_in_slices`. `functools.wraps` copies it."""
    for function in functions:
        if not getattr(function, "runs_in_slices", False):
            yield function
