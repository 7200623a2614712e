"""Finds what a program attaches to modules: hooks, and functions that replace or wrap their calls.

Features that call a module's parts, or call a module several times per micro-batch, change when
this code runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.modules.module as torch_module
import wrapt
from megatron.core.utils import unwrap_model

Function = Callable[..., Any]

KNOWN = frozenset({"apex", "megatron", "megatron_ext", "transformer_engine"})
"""Packages whose hooks and modules are not the program's."""
# torch's modules, and decorators that only time or set up, such as `torch.no_grad`.
_NEUTRAL = frozenset({"nvtx", "torch"}) | sys.stdlib_module_names - {"__main__"}


def hooks_of(module: torch.nn.Module) -> Iterator[Function]:
    """Yield a module's forward and backward hooks that are not Megatron's or ours."""
    hooks = chain(
        module._forward_pre_hooks.values(),
        module._forward_hooks.values(),
        module._backward_pre_hooks.values(),
        module._backward_hooks.values(),
    )
    yield from filter(is_of_program, hooks)


def hooks_of_all_modules() -> Iterator[tuple[int, Function]]:
    """Yield the hooks that torch runs on every module and that are not Megatron's or ours.

    Each result consists of the number that torch gave to the hook, which it never gives again, and
    the hook.
    """
    hooks = chain(
        torch_module._global_forward_pre_hooks.items(),
        torch_module._global_forward_hooks.items(),
        torch_module._global_backward_pre_hooks.items(),
        torch_module._global_backward_hooks.items(),
    )
    for number, hook in hooks:
        if is_of_program(hook):
            yield number, hook


def wrappers_around(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that Megatron wraps around a chunk's model, such as its DDP."""
    model = unwrap_model(chunk)
    wrapper = chunk
    while wrapper is not model:
        yield wrapper
        wrapper = wrapper.module  # type: ignore[assignment]


def is_of_program(hook: Function) -> bool:
    """Return whether a hook is neither Megatron's nor ours."""
    innermost = module_of(hook).partition(".")[0]
    return innermost not in KNOWN or program_call_of(hook) is not None


def program_call_of(function: Function) -> Function | None:
    """Return the program's function that runs when a method or hook is called, or None.

    It is the function itself, or one that wraps it, with or without `functools.wraps`.
    """
    return next(program_calls_of(function), None)


def program_calls_of(function: Function) -> Iterator[Function]:
    """Yield the program's functions that run when a method is called, from the outermost one."""
    for link in _links(function):
        package = _place_of(link).partition(".")[0]
        if package not in KNOWN and package not in _NEUTRAL:
            yield link


def module_of(function: Function) -> str:
    """Return the name of the Python module that defines a function, without its decorators."""
    *_, innermost = _links(function)
    return _place_of(innermost)


def _links(function: Any) -> Iterator[Function]:
    """Yield the functions that run when a function is called, from the outermost decorator."""
    while function is not None:
        if isinstance(function, partial):
            function = function.func
            continue
        if isinstance(function, wrapt.ObjectProxy):
            # A proxy has all attributes of the function that it wraps.
            wrapper: Any = getattr(function, "_self_wrapper", function)
            yield wrapper
        else:
            yield function
        function = getattr(function, "__wrapped__", None)


def _place_of(function: Any) -> str:
    # A wrapper may itself be a `partial`.
    while isinstance(function, partial):
        function = function.func
    # Prefer this to `__module__`, which `functools.wraps` copies from the wrapped function.
    module_globals = getattr(function, "__globals__", None)
    if module_globals is not None:
        return str(module_globals.get("__name__", ""))
    return getattr(function, "__module__", None) or ""


def name_of(function: Any) -> str:
    """Return a function's name for messages."""
    while isinstance(function, partial):
        function = function.func
    # `functools.wraps` copies the name too, so read it from the code.
    code = getattr(function, "__code__", None)
    if hasattr(function, "__wrapped__") and code is not None:
        return str(getattr(code, "co_qualname", code.co_name))  # since Python 3.11
    return getattr(function, "__qualname__", type(function).__name__)
