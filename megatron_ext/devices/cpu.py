"""The host as a device: the whole of Megatron on CPUs, with gloo collectives.

Upstream asserts CUDA in its first line. `on_host` redirects its calls of `torch.cuda` and its
device names. Features that need a GPU are off by default (`argument_defaults`) or refused with the
reason (`argument_rules`). Meant for laptops, CI and tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.devices.rules import CUDA_ONLY, TRANSFORMER_ENGINE_ONLY, Lack, flag
from megatron_ext.errors import DeviceError

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.backend import Redirect, Sharing

__all__ = ["CpuDevice", "argument_rules"]

_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "upstream refuses tensor parallelism without it on the device generation that we report",
    ),
    "TORCHDYNAMO_DISABLE": ("1", "compiling small host kernels takes longer than running them"),
}

_DEFAULTS: dict[str, tuple[object, str]] = {
    "transformer_impl": ("local", "Transformer Engine has no CPU kernels"),
    "apply_rope_fusion": (False, "the fused rotary embedding is a CUDA kernel"),
    "gradient_accumulation_fusion": (False, "fused gradient accumulation is a CUDA kernel"),
    "no_persist_layer_norm": (True, "the persistent layer norm is a CUDA kernel"),
    "masked_softmax_fusion": (False, "the fused softmax is a CUDA kernel"),
    "distributed_backend": ("gloo", "NCCL moves GPU memory only"),
    "enable_gloo_process_groups": (
        False,
        "all groups are gloo groups already, and each group costs two threads",
    ),
}


def argument_rules() -> tuple[Lack, ...]:
    """Return the combinations of arguments that upstream cannot run on the host."""
    return (
        *TRANSFORMER_ENGINE_ONLY,
        *CUDA_ONLY,
        Lack(
            flag("overlap_p2p_comm_warmup_flush"),
            "--overlap-p2p-communication-warmup-flush relies on NCCL's stream order: with gloo the "
            "evaluation never ends; leave it out",
        ),
        Lack(
            lambda args: flag("async_save")(args) and flag("use_persistent_ckpt_worker")(args),
            "--use-persistent-ckpt-worker would read parameters from shared memory while training "
            "changes them (on a GPU they are copied to the host first); leave it out, --async-save "
            "forks then",
        ),
    )


class CpuDevice:
    """The `cpu` backend with gloo collectives."""

    name = "cpu"
    distributed_backend = "gloo"
    reaches_peers = False
    environment: Mapping[str, tuple[str, str]] = _ENVIRONMENT
    argument_defaults: Mapping[str, tuple[object, str]] = _DEFAULTS
    known_lacks: tuple[str, ...] = (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"Only transformer-engine>=",
        r"'pin_memory' argument is set as true",
    )

    def missing(self) -> str | None:
        """Check for gloo; every torch build has the rest."""
        import torch

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            return f"torch {torch.__version__} was built without gloo; install a stock build"
        return None

    def redirects(self) -> Iterator[Redirect]:
        """List the redirects that make `torch.cuda` and its names mean the host."""
        from megatron_ext.devices import on_host

        yield from on_host.redirects()

    def argument_errors(self, args: Any) -> list[str]:
        """Apply `argument_rules`."""
        return [rule.message for rule in argument_rules() if rule.refuses(args)]

    def torch_device(self, _local_rank: int = 0) -> torch.device:
        """Return the host."""
        import torch

        return torch.device("cpu")

    def bind(self, _local_rank: int) -> None:
        """Do nothing: the operating system places processes."""

    def synchronize(self) -> None:
        """Do nothing: work on the host is done when its call returns."""

    def peak_memory_bytes(self) -> int:
        """Return the peak resident memory of this process."""
        from megatron_ext.devices import host

        return host.peak_rss_bytes()

    def timing_event(self) -> None:
        """Return None: the host's clock measures the device."""

    def copies(self, _device: torch.device) -> None:
        """Return None: the device is the host."""

    def sharing(self, _device: torch.device) -> Sharing:
        """Refuse: processes share the memory of the host without it."""
        raise DeviceError(
            "--pipeline-device-path ipc bypasses host memory, but the device cpu is the host; "
            "leave it out"
        )
