"""The interface of a device backend: a name, a collective backend, redirects and rules.

Upstream is written for one kind of device and spells it everywhere: `torch.cuda.current_device()`,
`device="cuda"`, `tensor.cuda()`, `backend="nccl"`. A backend makes that spelling mean its own
device by *redirects*: plain attribute assignments into torch, listed as data. A backend never
assigns anything itself; `megatron_ext.patches.device` turns the table into registry patches, so
every redirect is listed by `megatron-ext patches list` and undone by `deactivate()`.

Only code that requests a CUDA device is translated. No tensor claims to live where it does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from megatron_ext.devices.copies import Copies
    from megatron_ext.devices.sharing import Sharing
    from megatron_ext.rules import Rule


class Redirect(NamedTuple):
    """One attribute outside this package that gets another value while the backend is armed."""

    target: str
    """`module:attribute.path`, as in `megatron_ext.patches.registry.Patch`."""
    # With the original as an argument, tables have no references to torch, and can be built before
    # torch is imported.
    make: Callable[[Any], object]
    """Called once, when the redirect is installed, with the original; returns the new value."""
    reason: str
    """One sentence for `megatron-ext patches list`."""


class Device(ABC):
    """A device backend, by default one whose module of torch has the interface of `torch.cuda`.

    Instances are stateless; the constructor does not import torch.
    """

    name: str
    """Name for users: `cpu`, `cuda` or `musa`; torch's name of the device type too."""

    distributed_backend: str
    """Backend name for `torch.distributed.init_process_group`."""

    is_host = False
    """Whether it is the host itself: it runs everything in order, in the host's memory."""

    environment: Mapping[str, tuple[str, str]] = {}
    """Environment variable -> (value, reason), set at arming unless the user has set it."""

    kernels: Mapping[str, tuple[str, str]] = {}
    """Package whose kernels upstream takes unless flags say otherwise -> (its module, the remedy
    without it)."""

    argument_defaults: Mapping[str, tuple[object, str]] = {}
    """Upstream argument (dest) -> (value, reason). Becomes the parser's default. An explicit flag
    with another value is refused with the reason, or taken if there is none, except
    `distributed_backend`, which is corrected with a logged notice."""

    lacks: tuple[Rule, ...] = ()
    """Combinations of upstream's arguments that are refused; upstream checks those for CUDA."""

    known_lacks: tuple[str, ...] = ()
    """Beginnings (regular expressions) of warnings about what such a device cannot have. One rank
    shows each of them once."""

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this machine cannot run the backend (with a remedy), or `None` if it can.

        If they differ, the software stack decides, not the hardware.
        """

    def redirects(self) -> Iterable[Redirect]:
        """List the backend's redirects. May import torch and the device's own package."""
        return ()

    def argument_errors(self, args: Any) -> list[str]:
        """Return the mistakes in parsed upstream arguments on this device; empty if none."""
        return [lack.message for lack in self.lacks if lack.refuses(args)]

    @property
    def runtime(self) -> Any:
        """`torch.cuda`, or the module with its interface; that of `torch.cpu` does nothing."""
        import torch

        # By name: torch's stubs know no other than `cuda`, and extensions add theirs when imported.
        return vars(torch)[self.name]

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return the device of the process with this local rank."""
        import torch

        return torch.device(self.name, local_rank)

    def bind(self, local_rank: int) -> None:
        """Make `torch_device(local_rank)` this process's current device."""
        self.runtime.set_device(local_rank)

    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""
        self.runtime.synchronize()

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this process on the device so far."""
        return int(self.runtime.max_memory_allocated())

    def timing_event(self) -> torch.Event:
        """Return a new mark for the device's stream.

        A thread that waits for it sleeps, and gets a RuntimeError if work before it failed.
        """
        # blocking: by default that thread would spin on a core.
        event: torch.Event = self.runtime.Event(enable_timing=True, blocking=True)
        return event

    def copies(self, device: torch.device) -> Copies:
        """Return the copier between host and `torch_device`."""
        from megatron_ext.devices.copies import Copies

        driver = getattr(self.runtime, f"{self.name}rt")()
        # Not all releases of torch_musa bind these calls; without them copies wait for the host.
        register = getattr(driver, f"{self.name}HostRegister", None)
        unregister = getattr(driver, f"{self.name}HostUnregister", None)
        pinning = (register, unregister) if register and unregister else None
        return Copies(self.runtime, device, pinning)

    @abstractmethod
    def sharing(self, device: torch.device) -> Sharing:
        """Return the means to share memory of `torch_device` with other processes of this host.

        Raises:
            DeviceError: The device cannot share memory; the message says why.
        """
