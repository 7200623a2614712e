"""Redirects that make torch's names of CUDA devices mean another device.

Upstream creates tensors with `device="cuda"`, moves them with `.cuda()`, compares `tensor.type()`
with `"torch.cuda.HalfTensor"` and opens groups with `backend="nccl"`. All backends other than CUDA
share these tables; each passes a `Translator` that maps upstream's device names to its own. Calls
with another device, or without one, pass through unchanged.

Factories and `Tensor.to` are on the hot path: their redirect is one dictionary look-up and one call
(about 0.2 us), not a wrapt proxy.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ext import devices
from megatron_ext.devices.backend import Redirect

__all__ = [
    "Translator",
    "collective_redirects",
    "spelling_redirects",
    "tensor_redirects",
    "translated_argument",
    "translated_class",
    "translator",
]

Translator = Callable[[Any], Any]
"""Maps a `device=` value (str, int, torch.device, None) to the value that torch gets."""

_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_NEW = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")


def translator(kind: str, *, indexed: bool) -> Translator:
    """Build the translator onto a device type.

    By torch's convention an integer names an accelerator, so integers are translated too.

    Args:
        kind: torch's name of the device type, such as `cpu`.
        indexed: Keep the device index (a machine may hold several of that kind).
    """
    import torch

    plain = torch.device(kind)

    def translate(device: Any) -> Any:
        if isinstance(device, str):
            if not device.startswith("cuda"):
                return device
            return kind + device[4:] if indexed else plain
        if isinstance(device, torch.device):
            if device.type != "cuda":
                return device
            device = plain if device.index is None else device.index
        if isinstance(device, int):
            return torch.device(kind, device) if indexed else plain
        return device

    return translate


def translated_argument(function: Callable[..., Any], translate: Translator) -> Callable[..., Any]:
    """Translate the parameter `device` of a function, by name or by position.

    A function without that parameter is returned as it is.
    """
    names = list(inspect.signature(function).parameters)
    if "device" not in names:
        return function
    position = names.index("device")

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], translate(args[position]), *args[position + 1 :])
        elif "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return function(*args, **kwargs)

    return call


def translated_class(base: type, translate: Translator) -> type:
    """Translate the parameter `device` of a class's constructor.

    The result constructs instances of `base`, and `isinstance` accepts every instance of `base`.
    """

    class Spelled(type):
        __call__ = staticmethod(translated_argument(base, translate))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    return Spelled(base.__name__, (), {"__doc__": base.__doc__, "__module__": base.__module__})


def tensor_redirects(translate: Translator, *, pinning: bool) -> Iterator[Redirect]:
    """List the redirects of all torch functions that accept the device of a tensor.

    Args:
        translate: Maps upstream's device names.
        pinning: Whether host memory can be pinned for the device; if not, requests to pin are
            ignored (they only promise faster copies).
    """

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        return _translated_factory(original, translate, pinning=pinning)

    for target in _factory_targets():
        yield Redirect(target, factory, "creates tensors on the device that upstream spells")
    yield Redirect(
        "torch:Tensor.to",
        lambda original: _translated_to(original, translate),
        "moves tensors to the device that upstream spells",
    )
    yield Redirect(
        "torch:Tensor.cuda",
        lambda _original: _cuda_method(translate),
        "tensor.cuda() means the device in use",
    )
    yield Redirect(
        "torch:load",
        lambda original: _translated_keyword(original, "map_location", translate),
        "loads tensors to the device that upstream spells",
    )
    if not pinning:
        yield Redirect(
            "torch:Tensor.pin_memory",
            lambda _original: _pin_memory,
            "without an accelerator there is nothing to pin host memory for",
        )


def spelling_redirects(kind: str) -> Iterator[Redirect]:
    """List the redirects of functions that accept or return a device type by its name.

    Args:
        kind: torch's name of the device type in use.
    """
    yield Redirect(
        "torch:Tensor.type",
        _translated_type,
        "upstream compares type names, such as torch.cuda.HalfTensor, with the device's prefix",
    )
    if kind != "cpu":  # the host is not an accelerator, and no tensor misreports its device
        yield Redirect(
            "torch:Tensor.is_cuda",
            lambda original: _translated_is_cuda(original, kind),
            "upstream uses it to test whether a tensor is on the device in use",
        )
    yield Redirect(
        "torch.amp.autocast_mode:autocast.__init__",
        lambda original: _translated_device_type(original, kind),
        "autocast for the device that upstream spells",
    )
    for module in ("torch.amp", "torch.amp.autocast_mode"):
        for function in ("custom_bwd", "custom_fwd"):
            yield Redirect(
                f"{module}:{function}",
                lambda original: _translated_device_type(original, kind),
                "upstream declares its autograd functions for the device type that it spells",
            )


def collective_redirects(backend: str) -> Iterator[Redirect]:
    """List the redirects that open process groups with `backend` instead of NCCL."""
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        for function, default in (("init_process_group", backend), ("new_group", None)):
            yield Redirect(
                f"{module}:{function}",
                functools.partial(_translated_group, backend=backend, default=default),
                f"process groups of this device use {backend}",
            )


def _factory_targets() -> list[str]:
    """Find every torch function and tensor method that creates a tensor from a `device` keyword.

    torch itself keeps this list, for `with torch.device(...)`. Reading it also fills its cache with
    the original functions, which that feature compares by identity.
    """
    import torch
    from torch.utils._device import _device_constructors

    homes = (torch, torch.fft, torch.nested)
    targets = []
    for function in _device_constructors():
        for home in homes:
            names = [name for name, value in vars(home).items() if value is function]
            targets += [f"{home.__name__}:{name}" for name in names if not name.startswith("_")]
    targets += [f"torch:{name}_like" for name in _LIKE]
    targets += [f"torch:Tensor.new_{name}" for name in _NEW]
    return sorted(set(targets))


def _translated_factory(
    original: Callable[..., Any], translate: Translator, *, pinning: bool
) -> Callable[..., Any]:
    from torch.jit import _builtins

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        if not pinning and "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    operator = _builtins._find_builtin(original)
    if operator is not None:  # torch.jit.script identifies functions by address
        _builtins._register_builtin(factory, operator)
        devices.keep_for_ever(factory)
    return factory


def _translated_to(original: Callable[..., Any], translate: Translator) -> Callable[..., Any]:
    import torch

    not_a_device = torch.dtype

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            if not isinstance(args[0], not_a_device):
                args = (translate(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda_method(translate: Translator) -> Callable[..., Any]:
    import torch

    def cuda(
        self: Any,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        target = translate("cuda" if device is None else device)
        return self.to(target, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _translated_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return CUDA type names to upstream, and true type names to other callers."""

    @functools.wraps(original)
    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
                own = original(self).rpartition(".")[0]
                dtype = f"{own}.{dtype.rpartition('.')[2]}"
            return original(self, dtype, *args, **kwargs)
        name: str = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron."):
            return "torch.cuda." + name.rpartition(".")[2]
        return name

    return type_


def _translated_is_cuda(original: Any, kind: str) -> property:
    """Tell upstream whether a tensor is on the device in use, and other callers the truth."""

    def is_cuda(self: Any) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron."):
            return bool(self.device.type == kind)
        return bool(original.__get__(self))

    return property(is_cuda)


def _translated_device_type(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Translate the argument `device_type`, given by keyword or as the first argument."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == "cuda":
            kwargs["device_type"] = kind
        elif "cuda" in args[:2]:  # after `self` in methods
            args = tuple(kind if value == "cuda" else value for value in args)
        return original(*args, **kwargs)

    return call


def _translated_keyword(
    original: Callable[..., Any], keyword: str, translate: Translator
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if keyword in kwargs:
            kwargs[keyword] = translate(kwargs[keyword])
        return original(*args, **kwargs)

    return call


def _pin_memory(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
    return tensor


def _translated_group(
    original: Callable[..., Any], *, backend: str, default: str | None
) -> Callable[..., Any]:
    """Replace the backend NCCL; `default` replaces a missing one.

    Options of an NCCL group and its CUDA device have no meaning for another backend and are
    dropped.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def open_group(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        asked = arguments.get("backend")
        if asked is None:
            arguments["backend"] = default
        elif "nccl" in str(asked):
            arguments["backend"] = backend
            arguments.pop("pg_options", None)
        device = arguments.get("device_id")
        if isinstance(device, int) or getattr(device, "type", None) == "cuda":
            del arguments["device_id"]
        return original(**arguments)

    return open_group
