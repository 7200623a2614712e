"""NVIDIA GPUs, which upstream is written for; nothing is redirected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.devices.backend import Accelerator
from megatron_ext.errors import DeviceError

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.backend import Copies, Redirect, Sharing


class CudaDevice(Accelerator):
    """The `cuda` backend with NCCL collectives."""

    name = "cuda"
    distributed_backend = "nccl"
    reaches_peers = True
    environment: Mapping[str, tuple[str, str]] = {}
    argument_defaults: Mapping[str, tuple[object, str]] = {}
    known_lacks: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Check for a CUDA build of torch and at least one visible GPU."""
        import torch

        # ROCm's builds of torch answer under the names of CUDA too.
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
            )
        if not torch.cuda.is_available():
            return "torch sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return None

    def redirects(self) -> Iterable[Redirect]:
        """Redirect nothing."""
        return ()

    def argument_errors(self, _args: Any) -> list[str]:
        """Refuse nothing: upstream checks its own arguments for this device."""
        return []

    def copies(self, device: torch.device) -> Copies:
        """Copy in streams, with host memory registered by `cudaHostRegister`."""
        from megatron_ext.devices.copies import StreamCopies

        driver = self.runtime.cudart()
        pinning = driver.cudaHostRegister, driver.cudaHostUnregister
        return StreamCopies(self.runtime, device, pinning)

    def sharing(self, device: torch.device) -> Sharing:
        """Share by the IPC calls of CUDA's runtime."""
        import torch

        from megatron_ext.devices.sharing import RuntimeSharing

        if torch.version.cuda is None:
            raise DeviceError(
                "--pipeline-device-path ipc does not support AMD GPUs; use "
                "--pipeline-device-path staged"
            )
        library = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
        return RuntimeSharing(self.runtime, device, library, "cuda")


def why_idle() -> str | None:
    """Return why a CUDA build of torch uses no GPU, in torch's words; None for other builds."""
    import torch

    if (torch.version.cuda is None and torch.version.hip is None) or torch.cuda.is_available():
        return None
    # Only the initialisation says why; `is_available` answers False and no more.
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition(". ")[0].splitlines()[0].rstrip(".")
    return "torch sees no GPU"
