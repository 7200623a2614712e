"""Moore Threads GPUs: `torch.cuda` means `torch.musa`, "cuda" means "musa" and NCCL means MCCL.

torch_musa mirrors the interface of `torch.cuda` under `torch.musa`, so most redirects are found by
comparing the two modules; the rest fills in what torch_musa leaves out (NVTX) or does differently.
Where torchada (the vendor's own translation layer) is installed, `torch.cuda` is its business: one
owner only, and this module adds just what torchada leaves to the caller.

The stack is recognised by `torch.version.musa`, not by a GPU that is present, so that a machine
without one (CI, a login node) can parse arguments and list patches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from megatron_ext.devices.backend import Copies, Redirect, Rule, Sharing, TimingEvent
from megatron_ext.devices.redirects import calling, nvtx_redirects, to
from megatron_ext.devices.rules import CUDA_ONLY, TRANSFORMER_ENGINE_ONLY, flag

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from megatron_ext.devices.translate import Translator

__all__ = ["MusaDevice"]

_LOG = logging.getLogger(__name__)

_SAME = "torch_musa offers the same under torch.musa"

_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "upstream refuses tensor parallelism without it below compute capability 10",
    ),
    "MCCL_PROTOS": ("2", "the protocol that Moore Threads trains Megatron models with"),
    "MCCL_CHECK_POINTERS": ("0", "checking every pointer of every collective costs time"),
    "MUSA_KERNEL_TIMEOUT": ("3200000", "waiting for a peer is not a hung kernel"),
}

_ENVIRONMENT_WITHOUT_TRITON = {
    "TORCHDYNAMO_DISABLE": ("1", "this build of torch has no Triton to compile functions with"),
}

_ENVIRONMENT_WITH_TORCHADA = {
    "TORCHADA_FORCE_CUDA_AVAILABLE": (
        "1",
        "torchada leaves torch.cuda.is_available alone otherwise, which upstream asserts first",
    ),
}

_DEFAULTS: dict[str, tuple[object, str]] = {
    "distributed_backend": ("mccl", "NCCL moves the memory of NVIDIA GPUs only"),
    "gradient_accumulation_fusion": (False, "fused gradient accumulation is a CUDA kernel of Apex"),
    "masked_softmax_fusion": (False, "the fused softmax is a CUDA kernel"),
}

_DEFAULTS_WITHOUT_TE: dict[str, tuple[object, str]] = {
    "transformer_impl": ("local", "Transformer Engine for MUSA is not installed"),
    "apply_rope_fusion": (False, "the fused rotary embedding is a Transformer Engine kernel"),
    "no_persist_layer_norm": (True, "the persistent layer norm is a CUDA kernel of Apex"),
}

_GROUPED_GEMM = Rule(
    flag("moe_grouped_gemm"),
    "--moe-grouped-gemm is accepted by upstream from CUDA compute capability 8 on, which MUSA does "
    "not claim; leave it out: experts then run one by one",
)


class MusaDevice:
    """The `musa` backend with MCCL collectives."""

    name = "musa"
    distributed_backend = "mccl"
    reaches_peers = True

    def __init__(self) -> None:
        self.environment: Mapping[str, tuple[str, str]] = {
            **_ENVIRONMENT,
            **({} if find_spec("triton") else _ENVIRONMENT_WITHOUT_TRITON),
            **(_ENVIRONMENT_WITH_TORCHADA if find_spec("torchada") else {}),
        }
        self.argument_defaults: Mapping[str, tuple[object, str]] = {
            **_DEFAULTS,
            **({} if _has_te() else _DEFAULTS_WITHOUT_TE),
        }

    def missing(self) -> str | None:
        """Check for the MUSA build of torch and its extension."""
        import torch

        if getattr(torch.version, "musa", None) is None:
            return (
                f"torch {torch.__version__} comes without torch_musa; install torch_musa and the "
                f"torch build that belongs to it (https://github.com/MooreThreads/torch_musa)"
            )
        return None

    def redirects(self) -> Iterator[Redirect]:
        """List what makes upstream's spelling mean MUSA, or what torchada leaves of it."""
        from megatron_ext.devices import translate

        cuda_to_musa = translate.translator("musa", indexed=True)
        yield from translate.spelling_redirects("musa")
        yield from _completions(cuda_to_musa)
        if _torchada() is not None:
            return
        yield from _namespace(cuda_to_musa)
        yield from nvtx_redirects()
        yield from translate.tensor_redirects(cuda_to_musa, pinning=True)
        yield from translate.collective_redirects(self.distributed_backend)

    def argument_errors(self, args: Any) -> list[str]:
        """Refuse what needs NVIDIA's libraries, or a Transformer Engine that is not there."""
        rules = CUDA_ONLY + ((_GROUPED_GEMM,) if _has_te() else TRANSFORMER_ENGINE_ONLY)
        return [rule.message for rule in rules if rule.refuses(args)]

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return GPU `local_rank` of this host."""
        import torch

        return torch.device("musa", local_rank)

    def bind(self, local_rank: int) -> None:
        """Make GPU `local_rank` current."""
        _musa().set_device(local_rank)

    def synchronize(self) -> None:
        """Wait for the current GPU."""
        _musa().synchronize()

    def peak_memory_bytes(self) -> int:
        """Return the peak that torch_musa's allocator has handed out."""
        return int(_musa().max_memory_allocated())

    def timing_event(self) -> TimingEvent:
        """Return an event of MUSA's clock."""
        event: TimingEvent = _musa().Event(enable_timing=True)
        return event

    def copies(self, device: torch.device) -> Copies:
        """Copy in streams; host memory is registered where torch_musa has a call for it."""
        from megatron_ext.devices.copies import HostRegister, StreamCopies

        runtime = _musa().musart()
        register = getattr(runtime, "musaHostRegister", None)
        unregister = getattr(runtime, "musaHostUnregister", None)
        known = HostRegister(register, unregister) if register and unregister else None
        return StreamCopies(_musa(), device, known)

    def sharing(self, device: torch.device) -> Sharing:
        """Share by the IPC calls of MUSA's runtime, which are named like CUDA's."""
        from megatron_ext.devices.sharing import RuntimeSharing

        return RuntimeSharing(_musa(), device, "libmusart.so", "musa")


@functools.cache
def _has_te() -> bool:
    return find_spec("transformer_engine") is not None


def _musa() -> Any:
    """Return `torch.musa`, which torch's stubs do not know."""
    import torch

    return vars(torch)["musa"]


def _torchada() -> ModuleType | None:
    """Load torchada if it is installed; importing it is what makes it translate.

    What it needs to know is in `_ENVIRONMENT_WITH_TORCHADA`.
    """
    if find_spec("torchada") is None:
        _LOG.info("torch.cuda means torch.musa: redirected by megatron_ext")
        return None
    torchada = import_module("torchada")
    version = getattr(torchada, "__version__", "of unknown version")
    _LOG.info("torch.cuda means torch.musa: redirected by torchada %s", version)
    return torchada


def _namespace(cuda_to_musa: Translator) -> Iterator[Redirect]:
    """List every name of `torch.cuda` that torch_musa has as well.

    torch_musa refuses `torch.device("cuda")` as an argument, so that is translated.
    """
    import torch

    from megatron_ext.devices.translate import translated_argument, translated_class

    def same(name: str, value: Any) -> Callable[[Any], object]:
        if isfunction(value):
            return calling(translated_argument(value, cuda_to_musa))
        if name in {"ExternalStream", "Stream", "device"}:
            return to(translated_class(value, cuda_to_musa))
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


def _completions(cuda_to_musa: Translator) -> Iterator[Redirect]:
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
