"""Moore Threads GPUs: `torch.cuda` means `torch.musa`, "cuda" means "musa" and NCCL means MCCL.

torch_musa mirrors `torch.cuda`'s interface under `torch.musa`, so most redirects follow from
comparing the two modules. The other redirects cover functions that torch_musa lacks (NVTX) or
implements differently. If torchada (the vendor's translation layer) is installed, it redirects
`torch.cuda`, and this module adds only the few redirects that torchada lacks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from megatron_ext.devices import translate
from megatron_ext.devices.backend import Device, Redirect
from megatron_ext.devices.lacks import CUDA_ONLY, TRANSFORMER_ENGINE_ONLY, TRITON_ONLY
from megatron_ext.devices.translate import calling, nvtx_redirects, to
from megatron_ext.rules import read_rules

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from megatron_ext.devices.sharing import Sharing

_LOG = logging.getLogger(__name__)

_SAME = "torch_musa offers the same under torch.musa"

_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "upstream refuses tensor parallelism without it below compute capability 10",
    ),
    "MCCL_PROTOS": ("2", "Moore Threads trains Megatron models with this protocol"),
    "MCCL_CHECK_POINTERS": (
        "0",
        "checking every pointer in every collective takes time",
    ),
    "MUSA_KERNEL_TIMEOUT": ("3200000", "waiting for a peer is not a hung kernel"),
}

_DEFAULTS: dict[str, tuple[object, str]] = {
    "distributed_backend": ("mccl", "NCCL only moves the memory of NVIDIA GPUs"),
    "gradient_accumulation_fusion": (
        False,
        "fused gradient accumulation is a CUDA kernel of Apex",
    ),
    "masked_softmax_fusion": (False, "the fused softmax is a CUDA kernel"),
}

_DEFAULTS_WITHOUT_TE: dict[str, tuple[object, str]] = {
    "transformer_impl": ("local", "Transformer Engine for MUSA is not installed"),
    "apply_rope_fusion": (
        False,
        "the fused rotary embedding is a Transformer Engine kernel",
    ),
    "no_persist_layer_norm": (
        True,
        "the persistent layer norm is a CUDA kernel of Apex",
    ),
}

_NCCL_ONLY = read_rules("""
    inprocess_restart
        --inprocess-restart aborts NCCL and gloo communicators, but MCCL communicators would keep
        waiting; remove it
""")
_GROUPED_GEMM = read_rules("""
    moe_grouped_gemm
        --moe-grouped-gemm requires CUDA compute capability 8 or higher in upstream, which MUSA does
        not claim; remove it: experts then run one by one
""")


class MusaDevice(Device):
    """The `musa` backend with MCCL collectives."""

    name = "musa"
    distributed_backend = "mccl"

    def __init__(self) -> None:
        self.environment = dict(_ENVIRONMENT)
        if find_spec("transformer_engine") is not None:
            self.argument_defaults = _DEFAULTS
            self.lacks = CUDA_ONLY + _NCCL_ONLY + _GROUPED_GEMM
        else:
            self.argument_defaults = _DEFAULTS | _DEFAULTS_WITHOUT_TE
            self.lacks = CUDA_ONLY + _NCCL_ONLY + TRANSFORMER_ENGINE_ONLY
        if find_spec("triton") is None:
            self.lacks += TRITON_ONLY
            self.environment["TORCHDYNAMO_DISABLE"] = (
                "1",
                "this build of torch has no Triton to compile functions with",
            )
        if find_spec("torchada") is not None:
            self.environment["TORCHADA_FORCE_CUDA_AVAILABLE"] = (
                "1",
                "upstream asserts torch.cuda.is_available(), which torchada otherwise leaves alone",
            )

    def missing(self) -> str | None:
        """Check for the MUSA build of torch and its extension."""
        import torch

        # Check the software stack only: a machine without a GPU (CI, a login node) can still parse
        # arguments and list patches.
        if getattr(torch.version, "musa", None) is None:
            return (
                f"torch {torch.__version__} comes without torch_musa; install torch_musa and the "
                f"matching torch build (https://github.com/MooreThreads/torch_musa)"
            )
        return None

    def redirects(self) -> Iterator[Redirect]:
        """List the redirects from CUDA names to MUSA, except those that torchada makes."""
        cuda_to_musa = translate.translator("musa")
        yield from translate.spelling_redirects("musa")
        yield from _completions(self.runtime, cuda_to_musa)
        # torchada redirects all other names; redirecting them again would translate them twice.
        if _torchada() is not None:
            return
        yield from _namespace(self.runtime, cuda_to_musa)
        yield from nvtx_redirects()
        yield from translate.tensor_redirects("musa")
        yield from translate.collective_redirects("mccl")

    def sharing(self, device: torch.device) -> Sharing:
        """Share memory through the MUSA runtime's IPC functions, which are named like CUDA's."""
        from megatron_ext.devices.sharing import Sharing

        return Sharing(self.runtime, device, "libmusart.so")


def _torchada() -> ModuleType | None:
    """Import torchada if it is installed; the import activates its translation."""
    # `MusaDevice.environment` has already configured torchada: a device is armed before its
    # redirects are listed.
    if find_spec("torchada") is None:
        _LOG.info("torch.cuda means torch.musa: redirected by megatron_ext")
        return None
    torchada = import_module("torchada")
    version = getattr(torchada, "__version__", "of unknown version")
    _LOG.info("torch.cuda means torch.musa: redirected by torchada %s", version)
    return torchada


def _namespace(musa: Any, cuda_to_musa: translate.Translator) -> Iterator[Redirect]:
    """List the redirects for all names in `torch.cuda` that torch_musa has too."""
    import torch

    # torch_musa rejects `torch.device("cuda")` as an argument, so translate the argument.
    def same(name: str, value: Any) -> Callable[[Any], object]:
        if isfunction(value):
            return calling(translate.translated_argument(value, cuda_to_musa))
        if name in {"ExternalStream", "Stream", "device"}:
            return to(translate.translated_class(value, cuda_to_musa))
        return to(value)

    private = ("_is_in_bad_fork", "_lazy_call", "_lazy_init")
    # `_completions` redirects these names to functions that behave differently.
    different = {"get_device_properties", "is_available"}
    names = {*torch.cuda.__all__, *private} - different
    for name in sorted(names):
        value = getattr(musa, name, None)
        if callable(value):
            yield Redirect(f"torch.cuda:{name}", same(name, value), _SAME)
    for name in torch.cuda.random.__all__:
        yield Redirect(
            f"torch.cuda.random:{name}", same(name, getattr(musa, name)), _SAME
        )
    for name in ("GradScaler", "autocast", "custom_bwd", "custom_fwd"):
        yield Redirect(f"torch.cuda.amp:{name}", to(getattr(musa.amp, name)), _SAME)
    yield Redirect(
        "torch.cuda:default_generators",
        to(_LazyGenerators(musa)),
        "torch_musa creates its generators when the device is first used",
    )


def _completions(musa: Any, cuda_to_musa: translate.Translator) -> Iterator[Redirect]:
    """List redirects for functions that torch_musa and torchada lack or implement differently."""
    import torch

    yield Redirect(
        "torch.cuda:is_available",
        calling(musa.is_available),
        "upstream asserts it at start-up, and torchada leaves it at False",
    )
    yield Redirect(
        "torch.cuda:get_device_properties",
        to(lambda device=None: musa.get_device_properties(cuda_to_musa(device))),
        "upstream omits the argument for the current device, but torch_musa requires it",
    )
    yield Redirect(
        "torch.nn:Module._apply",
        _keep_attributes,
        "torch replaces parameters that it moves from the host to this device, and the attributes "
        "that upstream has set on them (sequence_parallel, shared, ...) would be lost",
    )
    if hasattr(torch.cuda, "device_memory_used"):

        def device_memory_used(device: Any = None) -> int:
            free, total = musa.mem_get_info(cuda_to_musa(device))
            return int(total - free)

        yield Redirect(
            "torch.cuda:device_memory_used",
            to(device_memory_used),
            "upstream logs it, but torch_musa offers only free and total memory",
        )


def _keep_attributes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy the parameters' attributes to their replacements."""

    # torch moves parameters to CUDA by swapping their data, so the parameter objects stay the same.
    # torch cannot swap data between the host and a device that an extension registers.
    @functools.wraps(original)
    def apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # Only this module's parameters: torch calls `_apply` for each submodule, too.
        before = dict(self._parameters)
        result: torch.nn.Module = original(self, *args, **kwargs)
        for name, parameter in before.items():
            replacement = self._parameters[name]
            if replacement is not None and replacement is not parameter:
                for attribute, value in vars(parameter).items():
                    vars(replacement).setdefault(attribute, value)
        return result

    return apply


# Look the tuple up lazily: torch_musa creates its generators when the device is first
# used, which is after the redirects are created.
class _LazyGenerators:
    """`torch.cuda.default_generators`, looked up at each use."""

    def __init__(self, musa: Any) -> None:
        self._musa = musa

    def __getitem__(self, index: Any) -> Any:
        self._musa._lazy_init()
        return self._musa.default_generators[index]

    def __len__(self) -> int:
        return int(self._musa.device_count())
