"""Redirects that map torch's CUDA device names to another device.

Upstream creates tensors with `device="cuda"`, moves them with `.cuda()`, compares `tensor.type()`
with `"torch.cuda.HalfTensor"` and opens groups with `backend="nccl"`. All backends other than CUDA
use these redirects; a `Translator` maps upstream's device names to the backend's. Calls with a
different device, or without a device, are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.devices.backend import Redirect

Translator = Callable[[Any], Any]
"""Maps a `device=` value (str, int, torch.device, None) to the value that is passed to torch."""


def to(value: Any) -> Callable[[Any], object]:
    """Return a `Redirect.make` that yields `value`."""
    return lambda _original: value


def calling(function: Callable[..., Any]) -> Callable[[Any], object]:
    """Return a `Redirect.make` whose function forwards to `function`."""

    # Create a new function for each redirect, so that undo recognises its copies elsewhere even if
    # `function` serves several redirects or is bound to other names.
    def make(_original: Any) -> object:
        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    return make


def answering(function: Callable[[], Any]) -> Callable[[Any], object]:
    """Return a `Redirect.make` whose function calls `function` and ignores its arguments."""

    def make(original: Any) -> object:
        def answer(*_args: Any, **_kwargs: Any) -> Any:
            return function()

        answer.__name__ = getattr(original, "__name__", "answer")
        return answer

    return make


def returning(result: Any) -> Callable[[Any], object]:
    """Return a `Redirect.make` whose function returns `result` and ignores its arguments."""
    return answering(lambda: result)


def translator(kind: str) -> Translator:
    """Return a translator to a device type, by its torch name; accelerators keep their index."""
    import torch

    without_index = torch.device(kind)
    has_indices = kind != "cpu"

    def translate(device: Any) -> Any:
        if isinstance(device, str):
            if not device.startswith("cuda"):
                return device
            # For example, "cuda:1" becomes "musa:1".
            if has_indices:
                return kind + device.removeprefix("cuda")
            return without_index
        if isinstance(device, torch.device):
            if device.type != "cuda":
                return device
            device = without_index if device.index is None else device.index
        # In torch, an integer is an accelerator's index.
        if isinstance(device, int):
            return torch.device(kind, device) if has_indices else without_index
        return device

    return translate


def translated_argument(
    function: Callable[..., Any], translate: Translator, name: str = "device"
) -> Callable[..., Any]:
    """Wrap a function so that one parameter, passed by name or position, is translated.

    A function without that parameter is returned unchanged.
    """
    names = list(inspect.signature(function).parameters)
    if name not in names:
        return function
    position = names.index(name)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            changed_args = list(args)
            changed_args[position] = translate(args[position])
            args = tuple(changed_args)
        elif name in kwargs:
            kwargs[name] = translate(kwargs[name])
        return function(*args, **kwargs)

    return call


def translated_class(base: type, translate: Translator) -> type:
    """Return a class whose constructor translates the parameter `device`.

    The constructor returns instances of `base`, and every instance of `base` is an instance of the
    class.
    """

    # A metaclass, because Megatron both calls such a class and tests instances against it.
    class Spelled(type):
        __call__ = staticmethod(translated_argument(base, translate))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    attributes = {"__doc__": base.__doc__, "__module__": base.__module__}
    return Spelled(base.__name__, (), attributes)


def tensor_redirects(kind: str) -> Iterator[Redirect]:
    """List the redirects for all torch functions that accept a tensor's device.

    On the host, requests for pinned memory are ignored, because there are no copies to a device.
    """
    import torch
    from torch.utils._device import _device_constructors

    translate = translator(kind)
    pinning = kind != "cpu"

    # For `with torch.device(...)`, torch keeps a list of the functions that create a tensor from a
    # `device` keyword. The list is cached, and torch compares its functions by identity, so read it
    # now, before the functions are redirected.
    constructors = {id(function) for function in _device_constructors()}
    targets: set[str] = set()
    for module in (torch, torch.fft, torch.nested):
        for name, value in vars(module).items():
            if id(value) in constructors and not name.startswith("_"):
                targets.add(f"{module.__name__}:{name}")
    for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"):
        targets.add(f"torch:{name}_like")
    for name in ("empty", "empty_strided", "full", "ones", "tensor", "zeros"):
        targets.add(f"torch:Tensor.new_{name}")
    # Factories and `Tensor.to` are on the hot path, so their redirects cost only one
    # dictionary look-up and one call (about 0.2 us) instead of a wrapt proxy.
    factory = functools.partial(_translated_factory, translate, pinning)
    for target in sorted(targets):
        yield Redirect(
            target, factory, "creates tensors on the device that upstream calls cuda"
        )

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        # The first argument of `to` may be a device, a dtype or a tensor. A dtype needs no
        # translation, and the translator returns a tensor unchanged.
        not_a_device = torch.dtype

        @functools.wraps(original)
        def move(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args:
                if not isinstance(args[0], not_a_device):
                    args = (translate(args[0]), *args[1:])
            elif "device" in kwargs:
                kwargs["device"] = translate(kwargs["device"])
            return original(self, *args, **kwargs)

        return move

    yield Redirect(
        "torch:Tensor.to",
        moving,
        "moves tensors to the device that upstream calls cuda",
    )

    def cuda(
        self: Any,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        target = translate("cuda" if device is None else device)
        return self.to(target, non_blocking=non_blocking, memory_format=memory_format)

    yield Redirect(
        "torch:Tensor.cuda", to(cuda), "tensor.cuda() means the device in use"
    )

    yield Redirect(
        "torch:load",
        functools.partial(
            translated_argument, translate=translate, name="map_location"
        ),
        "loads tensors to the device that upstream calls cuda",
    )
    if not pinning:
        yield Redirect(
            "torch:Tensor.pin_memory",
            to(lambda tensor, *_args, **_kwargs: tensor),
            "without an accelerator there is nothing to pin host memory for",
        )


def _translated_factory(
    translate: Translator, pinning: bool, original: Callable[..., Any]
) -> Callable[..., Any]:
    from torch.jit import _builtins

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        if not pinning and "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    operator = _builtins._find_builtin(original)
    # torch.jit.script finds a function's operator by the function's id, so it must know the new
    # function too.
    if operator is not None:
        _builtins._register_builtin(make, operator)
        # Remove the entry together with the function, or a later object with the same id would
        # match it.
        weakref.finalize(make, _builtins._get_builtin_table().pop, id(make), None)
    return make


def spelling_redirects(kind: str) -> Iterator[Redirect]:
    """List the redirects for functions that accept or return a device type by its torch name."""
    yield Redirect(
        "torch:Tensor.type",
        _translated_type,
        "upstream compares type names, such as torch.cuda.HalfTensor, with the device's prefix",
    )

    def being_cuda(original: Any) -> property:
        def is_cuda(self: Any) -> bool:
            # Only Megatron's modules get this result; all other code gets the true one.
            caller = sys._getframe(1).f_globals
            if caller.get("__name__", "").startswith("megatron."):
                return bool(self.device.type == kind)
            return bool(original.__get__(self))

        return property(is_cuda)

    # On the host, `is_cuda` stays False: a host tensor is not in accelerator memory.
    if kind != "cpu":
        yield Redirect(
            "torch:Tensor.is_cuda",
            being_cuda,
            "upstream uses it to test whether a tensor is on the device in use",
        )

    device_type = functools.partial(
        translated_argument,
        translate=lambda device_type: kind if device_type == "cuda" else device_type,
        name="device_type",
    )
    yield Redirect(
        "torch.amp.autocast_mode:autocast.__init__",
        device_type,
        "autocasts on the device that upstream calls cuda",
    )
    for module in ("torch.amp", "torch.amp.autocast_mode"):
        for function in ("custom_bwd", "custom_fwd"):
            yield Redirect(
                f"{module}:{function}",
                device_type,
                "upstream declares its autograd functions for the device type cuda",
            )


def _translated_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
                # Use the prefix for the tensor's device: torch.musa.HalfTensor for
                # torch.cuda.HalfTensor.
                prefix, _, _ = original(self).rpartition(".")
                _, _, type_name = dtype.rpartition(".")
                dtype = f"{prefix}.{type_name}"
            return original(self, dtype, *args, **kwargs)
        name: str = original(self, *args, **kwargs)
        # Return CUDA's names to upstream, and the true names to all other callers.
        caller = sys._getframe(1).f_globals
        if caller.get("__name__", "").startswith("megatron."):
            _, _, type_name = name.rpartition(".")
            return f"torch.cuda.{type_name}"
        return name

    return type_


def collective_redirects(backend: str) -> Iterator[Redirect]:
    """List the redirects that open process groups with `backend` instead of NCCL."""

    def opening(
        original: Callable[..., Any], default: str | None
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def open_group(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            requested_backend = arguments.get("backend")
            if requested_backend is None:
                arguments["backend"] = default
            elif "nccl" in str(requested_backend):
                arguments["backend"] = backend
                # These options are specific to NCCL, and other backends reject them.
                arguments.pop("pg_options", None)
            # A device_id binds the group to a CUDA device, which does not exist here.
            device = arguments.get("device_id")
            names_cuda = getattr(device, "type", None) == "cuda"
            if isinstance(device, int) or names_cuda:
                del arguments["device_id"]
            return original(**arguments)

        return open_group

    # `new_group` without a backend uses the one of the default group.
    defaults = {"init_process_group": backend, "new_group": None}
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        for function, default in defaults.items():
            yield Redirect(
                f"{module}:{function}",
                functools.partial(opening, default=default),
                f"process groups of this device use {backend}",
            )


def nvtx_redirects() -> Iterator[Redirect]:
    """List the redirects for NVTX markers, which raise an error in torch builds without CUDA."""
    reason = "marks ranges for NVIDIA's profiler, which supports no other device"
    for name in ("mark", "range_end", "range_pop", "range_push", "range_start"):
        yield Redirect(f"torch.cuda.nvtx:{name}", returning(0), reason)

    @contextmanager  # also usable as a decorator, like torch's
    def unmarked(*_args: Any, **_named: Any) -> Iterator[None]:
        yield

    yield Redirect("torch.cuda.nvtx:range", to(unmarked), reason)
