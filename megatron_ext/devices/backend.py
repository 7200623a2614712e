"""The interface for device backends: a name, a collective backend, redirects and rules.

Upstream is written for a single kind of device and names it everywhere:
`torch.cuda.current_device()`, `device="cuda"`, `tensor.cuda()`, `backend="nccl"`. A backend maps
these names to its own device with *redirects*: attribute assignments into torch, listed as data.
The backend itself assigns nothing; `megatron_ext.patches.device` turns the redirects into registry
patches, so `megatron-ext patches list` shows every redirect and `deactivate()` undoes it.

Only requests for a CUDA device are translated. A tensor always reports the device that it is
actually on.
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
    """An attribute outside this package that is replaced while the backend is armed."""

    target: str
    """`module:attribute.path`, as in `megatron_ext.patches.registry.Patch`."""
    # `make` takes the original as an argument, so a redirect holds no reference to the attribute's
    # original value.
    make: Callable[[Any], object]
    """Called once with the original, when the redirect is installed; returns the new value."""
    reason: str
    """One sentence for `megatron-ext patches list`."""


class Device(ABC):
    """A device backend. By default, its torch module has the same interface as `torch.cuda`.

    The constructor does not import torch. Backends are stateless, except that the host backend
    remembers connections (`follow_collectives`).
    """

    name: str
    """The name that users type: `cpu`, `cuda` or `musa`. It is also torch's name for the device
    type."""

    distributed_backend: str
    """Name of the backend for `torch.distributed.init_process_group`."""

    is_host = False
    """Whether the device is the host itself, which runs everything in order and in host memory."""

    environment: Mapping[str, tuple[str, str]] = {}
    """Environment variable -> (value, reason). Set when the backend is armed, unless the user has
    set it."""

    kernels: Mapping[str, tuple[str, str]] = {}
    """Package whose kernels upstream uses by default -> (its module, the remedy if the package is
    not installed)."""

    argument_defaults: Mapping[str, tuple[object, str]] = {}
    """Upstream argument (dest) -> (value, reason). The value becomes the parser's default. A flag
    with a different value is rejected with the reason, or accepted if the reason is empty.
    `distributed_backend` is corrected instead, with a warning."""

    lacks: tuple[Rule, ...] = ()
    """Combinations of upstream arguments that this device rejects. Upstream's own checks assume
    CUDA."""

    known_lacks: tuple[str, ...] = ()
    """Regular expressions that match the start of warnings about features that this device does not
    support. Each warning is shown once, on one rank."""

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this machine cannot run the backend (with a remedy), or `None` if it can.

        This checks the installed software stack; no device has to be present.
        """

    def redirects(self) -> Iterable[Redirect]:
        """List the backend's redirects. May import torch and the device's own package."""
        return ()

    def argument_errors(self, args: Any) -> list[str]:
        """Return the mistakes in parsed upstream arguments for this device; may be empty."""
        return [lack.message for lack in self.lacks if lack.refuses(args)]

    @property
    def runtime(self) -> Any:
        """`torch.cuda`, or the device's module with the same interface.

        On the host this is `torch.cpu`, whose functions do nothing.
        """
        import torch

        # Look the module up by name: torch's stubs declare only `cuda`, and extensions add their
        # module when they are imported.
        return vars(torch)[self.name]

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return the device for the process with this local rank."""
        import torch

        return torch.device(self.name, local_rank)

    def bind(self, local_rank: int) -> None:
        """Make `torch_device(local_rank)` this process's current device."""
        self.runtime.set_device(local_rank)

    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""
        self.runtime.synchronize()

    def peak_memory_bytes(self) -> int:
        """Return this process's peak memory use on the device so far."""
        return int(self.runtime.max_memory_allocated())

    def timing_event(self) -> torch.Event:
        """Return a new event that can be recorded in the device's stream.

        A thread that waits for the event sleeps, and gets a RuntimeError if earlier work failed.
        """
        # blocking: without it, the waiting thread would spin on a core.
        event: torch.Event = self.runtime.Event(enable_timing=True, blocking=True)
        return event

    def follow_collectives(self) -> None:  # noqa: B027 - only gloo needs it
        """Remember the connections of new process groups, for `abort_collectives`."""

    def abort_collectives(self) -> None:  # noqa: B027 - only gloo needs it
        """Unblock collectives that lost a rank and that torch cannot abort. Groups stay broken.

        Call it after `follow_collectives`, from a thread that is not itself waiting.
        """

    def copies(self, device: torch.device) -> Copies:
        """Return the object that copies between the host and `torch_device`."""
        from megatron_ext.devices.copies import Copies

        # The driver is `torch.cuda.cudart()` or `torch.musa.musart()`.
        open_driver = getattr(self.runtime, f"{self.name}rt")
        driver = open_driver()
        # Some releases of torch_musa do not bind these calls; copies then block the host.
        register = getattr(driver, f"{self.name}HostRegister", None)
        unregister = getattr(driver, f"{self.name}HostUnregister", None)
        pinning = None
        if register and unregister:
            pinning = (register, unregister)
        return Copies(self.runtime, device, pinning)

    @abstractmethod
    def sharing(self, device: torch.device) -> Sharing:
        """Return the object that shares `torch_device`'s memory with other processes on this host.

        Raises:
            DeviceError: The device cannot share memory; the message says why.
        """
