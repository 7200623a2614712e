"""NVIDIA GPUs. Upstream is written for them, so nothing is redirected or rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_ext.devices.backend import Device
from megatron_ext.errors import DeviceError

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.sharing import Sharing


class CudaDevice(Device):
    """The `cuda` backend with NCCL collectives."""

    name = "cuda"
    distributed_backend = "nccl"
    kernels: Mapping[str, tuple[str, str]] = {
        "Transformer Engine": (
            "transformer_engine",
            (
                "add --transformer-impl local --no-persist-layer-norm --no-rope-fusion "
                "--no-masked-softmax-fusion, or pip install 'transformer-engine[pytorch]'"
            ),
        ),
        "Apex": (
            "fused_weight_gradient_mlp_cuda",
            "add --no-gradient-accumulation-fusion, or build NVIDIA's Apex with its extensions",
        ),
    }

    def missing(self) -> str | None:
        """Check for a CUDA build of torch and at least one visible GPU."""
        import torch

        # ROCm builds of torch use CUDA's names too.
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                f"torch {torch.__version__} was built without CUDA; "
                "install a CUDA build of torch"
            )
        if not torch.cuda.is_available():
            return "torch sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return None

    def sharing(self, device: torch.device) -> Sharing:
        """Share memory through the CUDA runtime's IPC functions.

        Raises:
            DeviceError: This is an AMD GPU, or the runtime's library is missing.
        """
        import torch

        from megatron_ext.devices.sharing import Sharing

        if torch.version.cuda is None:
            raise DeviceError(
                "--pipeline-device-path ipc does not support AMD GPUs; use "
                "--pipeline-device-path staged"
            )
        # torch's wheels contain the runtime only under its name with the major version.
        major, _, _ = torch.version.cuda.partition(".")
        return Sharing(self.runtime, device, f"libcudart.so.{major}")


def why_idle() -> str | None:
    """Return why a CUDA build of torch sees no GPU, in torch's words; None for other builds."""
    import torch

    is_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    if not is_gpu_build or torch.cuda.is_available():
        return None
    # Only initialisation reports the reason; `is_available` just returns False.
    try:
        torch.cuda.init()
    except RuntimeError as error:
        # The first sentence gives the reason. Advice about drivers follows.
        reason, _, _advice = str(error).partition(". ")
        return reason.splitlines()[0].rstrip(".")
    return "torch sees no GPU"
