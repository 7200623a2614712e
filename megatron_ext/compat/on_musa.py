"""What makes upstream's spelling of CUDA mean MUSA, or what torchada leaves of that.

torch_musa mirrors the interface of `torch.cuda` under `torch.musa`, so most redirects are found by
comparing the two modules; the rest fills in what torch_musa leaves out (NVTX) or does differently.
Where torchada (the vendor's own translation layer) is installed, `torch.cuda` is its business: one
owner only, and this module adds just what torchada leaves to the caller.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from megatron_ext.compat import translate
from megatron_ext.compat.redirects import calling, nvtx_redirects, to
from megatron_ext.devices.backend import Redirect

if TYPE_CHECKING:
    from types import ModuleType

    import torch

__all__ = ["redirects"]

_LOG = logging.getLogger(__name__)

_SAME = "torch_musa offers the same under torch.musa"


def redirects() -> Iterator[Redirect]:
    """List them all."""
    cuda_to_musa = translate.translator("musa", indexed=True)
    yield from translate.spelling_redirects("musa")
    yield from _completions(cuda_to_musa)
    if _torchada() is not None:
        return
    yield from _namespace(cuda_to_musa)
    yield from nvtx_redirects()
    yield from translate.tensor_redirects(cuda_to_musa, pinning=True)
    yield from translate.collective_redirects("mccl")


def _musa() -> Any:
    """Return `torch.musa`, which torch's stubs do not know."""
    import torch

    return vars(torch)["musa"]


def _torchada() -> ModuleType | None:
    """Load torchada if it is installed; importing it is what makes it translate.

    What it needs to know is in the environment of `MusaDevice`.
    """
    if find_spec("torchada") is None:
        _LOG.info("torch.cuda means torch.musa: redirected by megatron_ext")
        return None
    torchada = import_module("torchada")
    version = getattr(torchada, "__version__", "of unknown version")
    _LOG.info("torch.cuda means torch.musa: redirected by torchada %s", version)
    return torchada


def _namespace(cuda_to_musa: translate.Translator) -> Iterator[Redirect]:
    """List every name of `torch.cuda` that torch_musa has as well.

    torch_musa refuses `torch.device("cuda")` as an argument, so that is translated.
    """
    import torch

    def same(name: str, value: Any) -> Callable[[Any], object]:
        if isfunction(value):
            return calling(translate.translated_argument(value, cuda_to_musa))
        if name in {"ExternalStream", "Stream", "device"}:
            return to(translate.translated_class(value, cuda_to_musa))
        return to(value)

    musa = _musa()
    private = ("_is_in_bad_fork", "_lazy_call", "_lazy_init")
    different = {"get_device_properties", "is_available"}
    for name in sorted({*torch.cuda.__all__, *private} - different):
        value = getattr(musa, name, None)
        if callable(value):
            yield Redirect(f"torch.cuda:{name}", same(name, value), _SAME)
    for name in torch.cuda.random.__all__:
        yield Redirect(f"torch.cuda.random:{name}", same(name, getattr(musa, name)), _SAME)
    for name in ("GradScaler", "autocast", "custom_bwd", "custom_fwd"):
        yield Redirect(f"torch.cuda.amp:{name}", to(getattr(musa.amp, name)), _SAME)
    yield Redirect(
        "torch.cuda:default_generators",
        to(_Generators()),
        "torch_musa makes its generators when the device is first used, and not before",
    )


def _completions(cuda_to_musa: translate.Translator) -> Iterator[Redirect]:
    """List what neither torch_musa nor torchada does as upstream expects of `torch.cuda`."""
    import torch

    musa = _musa()
    yield Redirect(
        "torch.cuda:is_available",
        calling(musa.is_available),
        "upstream asserts it first of all; torchada leaves it at False",
    )
    yield Redirect(
        "torch.cuda:get_device_properties",
        to(lambda device=None: musa.get_device_properties(cuda_to_musa(device))),
        "upstream asks about the current device by leaving the argument out, torch_musa wants it",
    )
    yield Redirect(
        "torch.nn:Module._apply",
        _keep_attributes,
        "torch makes new parameters when it moves host parameters to a device of this kind, and "
        "upstream's marks on them (sequence_parallel, shared, ...) would be lost",
    )
    if hasattr(torch.cuda, "device_memory_used"):
        yield Redirect(
            "torch.cuda:device_memory_used",
            to(lambda device=None: _device_memory_used(cuda_to_musa(device))),
            "upstream logs it; torch_musa has free and total memory instead",
        )


def _keep_attributes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Carry what was attached to parameters over to those that take their place.

    CUDA parameters are moved by exchanging their data, so that they stay the same objects. torch
    does not allow that between the host and a device that is registered from outside.
    """

    @functools.wraps(original)
    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        before = dict(self._parameters)
        result: torch.nn.Module = original(self, *args, **kwargs)
        for name, parameter in before.items():
            moved = self._parameters[name]
            if moved is not None and moved is not parameter:
                for attribute, value in vars(parameter).items():
                    vars(moved).setdefault(attribute, value)
        return result

    return apply


def _device_memory_used(device: Any) -> int:
    free, total = _musa().mem_get_info(device)
    return int(total - free)


class _Generators:
    """`torch.cuda.default_generators`: looked up on use, because they appear with the first use."""

    def __getitem__(self, index: Any) -> Any:
        musa = _musa()
        musa._lazy_init()
        return musa.default_generators[index]

    def __len__(self) -> int:
        return int(_musa().device_count())
