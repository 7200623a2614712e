"""Moore Threads GPUs: `torch.cuda` means `torch.musa`, "cuda" means "musa" and NCCL means MCCL.

`torch.version.musa` identifies the stack, not a present GPU, so a machine without one (CI, a login
node) can parse arguments and list patches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.devices.backend import Accelerator, Copies, Redirect, Sharing
from megatron_ext.devices.rules import CUDA_ONLY, TRANSFORMER_ENGINE_ONLY, Lack, flag

if TYPE_CHECKING:
    import torch

__all__ = ["MusaDevice"]

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

_GROUPED_GEMM = Lack(
    flag("moe_grouped_gemm"),
    "--moe-grouped-gemm is accepted by upstream from CUDA compute capability 8 on, which MUSA does "
    "not claim; leave it out: experts then run one by one",
)


class MusaDevice(Accelerator):
    """The `musa` backend with MCCL collectives."""

    name = "musa"
    distributed_backend = "mccl"
    reaches_peers = True

    known_lacks: tuple[str, ...] = ()

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
        """List the redirects from CUDA names to MUSA, without those that torchada makes."""
        from megatron_ext.devices import on_musa

        yield from on_musa.redirects()

    def argument_errors(self, args: Any) -> list[str]:
        """Refuse features that need NVIDIA's libraries or a missing Transformer Engine."""
        rules = CUDA_ONLY + ((_GROUPED_GEMM,) if _has_te() else TRANSFORMER_ENGINE_ONLY)
        return [rule.message for rule in rules if rule.refuses(args)]

    def copies(self, device: torch.device) -> Copies:
        """Copy in streams; register host memory if torch_musa has a call for it."""
        from megatron_ext.devices.copies import StreamCopies

        driver = self.runtime.musart()
        register = getattr(driver, "musaHostRegister", None)
        unregister = getattr(driver, "musaHostUnregister", None)
        pinning = (register, unregister) if register and unregister else None
        return StreamCopies(self.runtime, device, pinning)

    def sharing(self, device: torch.device) -> Sharing:
        """Share by the IPC calls of MUSA's runtime, which are named like CUDA's."""
        from megatron_ext.devices.sharing import RuntimeSharing

        return RuntimeSharing(self.runtime, device, "libmusart.so", "musa")


@functools.cache
def _has_te() -> bool:
    return find_spec("transformer_engine") is not None
