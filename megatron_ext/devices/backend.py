"""What a device backend is: a name, a collective backend, a table of redirects and some rules.

Upstream is written for one kind of device and spells it everywhere: `torch.cuda.current_device()`,
`device="cuda"`, `tensor.cuda()`, `backend="nccl"`. A backend makes that spelling mean its own
device by *redirects*: plain attribute assignments into torch, listed as data. A backend never
assigns anything itself; `megatron_ext.patches.device` turns the table into registry patches, so
every redirect is listed by `megatron-ext patches list` and undone by `deactivate()`.

Only code that asks for a CUDA device is translated. No tensor claims to live where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "Copied",
    "Copies",
    "Device",
    "Redirect",
    "Rule",
    "SharedBuffer",
    "Sharing",
    "TimingEvent",
]


@dataclass(frozen=True)
class Redirect:
    """One attribute outside this package that gets another value while the backend is armed.

    Args:
        target: `module:attribute.path`, as in `megatron_ext.patches.registry.Patch`.
        make: Called once, when the redirect is installed, with the value that is there now (`None`
            with `creates`); returns the new value. Taking the original as an argument keeps the
            table free of references to torch, so that it can be built before torch is imported.
        reason: One sentence for `megatron-ext patches list`.
        creates: The attribute does not exist in this torch; installing adds it, undoing removes it.
    """

    target: str
    make: Callable[[Any], object]
    reason: str
    creates: bool = False


@dataclass(frozen=True)
class Rule:
    """A combination of upstream arguments that the backend cannot run.

    Args:
        refuses: Tells from parsed arguments whether the combination is asked for. Reads arguments
            with `getattr(args, name, default)`: a YAML configuration may lack any of them.
        message: Value, rule and remedy.
    """

    refuses: Callable[[Any], bool]
    message: str


class TimingEvent(Protocol):
    """A mark in the stream of a device: everything that was queued before it is done."""

    def record(self) -> None:
        """Put the mark into the current stream."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this mark to another; both must have been passed."""
        ...


class Copied(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Sleep until the copy is done; by any thread.

        Raises:
            RuntimeError: The device failed, in this copy or in something before it.
        """
        ...


class Copies(Protocol):
    """Copies between host and device that run beside what the device computes.

    Both kinds only begin when they are called, and name their end. Until then the source has to
    stay as it is, and the copy means nothing to anybody but the device itself.
    """

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        """Copy a contiguous device tensor once everything is done that was queued before."""
        ...

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        """Copy a host tensor; what is queued after this call finds it done."""
        ...

    def pin(self, address: int, num_bytes: int) -> bool:
        """Make host memory known to the device, for faster copies; whole pages.

        Returns:
            Whether it worked. If not, copies from there work as well, but the caller waits for
            them; that is logged here.
        """
        ...

    def unpin(self, address: int) -> None:
        """Take `pin` back, before the memory goes."""
        ...


@dataclass
class SharedBuffer:
    """Memory of a device that its owner writes to and one other process reads."""

    num_bytes: int
    handle: bytes
    """Opaque bytes for the other process: for its `open`, or for the owner's `attach`."""
    address: int
    storage: torch.UntypedStorage
    """Of the same bytes. Does not own them."""
    used: Any
    """Event of this process: it has written, or read."""
    used_there: Any = None
    """The same of the other process, from the time that this one knows of it."""


class Sharing(Protocol):
    """Memory of one device that processes of one host hand to each other.

    Owner and reader take turns, and tell each other when: after `push` the owner tells the reader,
    which does `pull` and tells the owner, which may do `push` again. Neither call waits: each makes
    the device wait for what the other process gave its own device to do. Whatever the driver
    refuses is a RuntimeError with its words.
    """

    name: str
    """What the device is called in all processes of the host."""

    def why_unreachable(self, name: str) -> str | None:
        """Say why this process cannot read the memory of a device, or return None if it can."""
        ...

    def make(self, num_bytes: int) -> SharedBuffer:
        """Allocate memory of at least that size, which another process can open."""
        ...

    def open(self, handle: bytes) -> SharedBuffer:
        """Map what another process made."""
        ...

    def attach(self, buffer: SharedBuffer, handle: bytes) -> None:
        """Make an own buffer wait for its reader from now on, by the handle that `open` made."""
        ...

    def push(self, buffer: SharedBuffer, tensor: torch.Tensor) -> None:
        """Copy a tensor into an own buffer, after all that was queued before; it may be dropped."""
        ...

    def pull(
        self, buffer: SharedBuffer, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Copy a tensor out of the buffer of another process; what is queued later finds it."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Wait until the copies of this process are done; False if that took too long."""
        ...

    def free(self, buffer: SharedBuffer) -> None:
        """Give up an own buffer that no other process has mapped any more."""
        ...

    def unmap(self, buffer: SharedBuffer) -> None:
        """Let go of the buffer of another process."""
        ...


class Device(Protocol):
    """A device backend. Instances are stateless: making one starts nothing and imports no torch."""

    name: str
    """How the user names it: `cpu`, `cuda` or `musa`."""

    distributed_backend: str
    """Backend name for `torch.distributed.init_process_group`."""

    reaches_peers: bool
    """Whether this backend moves tensors between devices of one host past the host's memory."""

    environment: Mapping[str, tuple[str, str]]
    """Environment variable -> (value, reason), set at arming where the user has not set it."""

    argument_defaults: Mapping[str, tuple[object, str]]
    """Upstream argument (dest) -> (value, reason). Becomes the parser's default; a user's explicit
    contrary flag is refused with the reason, except for `distributed_backend`, which is corrected
    with a logged notice."""

    def missing(self) -> str | None:
        """Say why this machine cannot run the backend (with the remedy), or `None` if it can.

        Looks at the software stack, not at present hardware, where the two differ.
        """
        ...

    def redirects(self) -> Iterable[Redirect]:
        """List what the backend redirects. May import torch (and the device's own package)."""
        ...

    def argument_errors(self, args: Any) -> list[str]:
        """List what is wrong with parsed upstream arguments on this device; empty if nothing is."""
        ...

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return the device that a process with this local rank computes on."""
        ...

    def bind(self, local_rank: int) -> None:
        """Make `torch_device(local_rank)` this process's current device."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on the current device is done."""
        ...

    def peak_memory_bytes(self) -> int:
        """Return the most memory that this process has held on the device so far."""
        ...

    def timing_event(self) -> TimingEvent | None:
        """Return a new mark for the device's stream; `None` where the host computes itself."""
        ...

    def copies(self, device: torch.device) -> Copies | None:
        """Return what copies between the host and a device; `None` if it is the host itself.

        Args:
            device: One that `torch_device` returned.
        """
        ...

    def sharing(self, device: torch.device) -> Sharing:
        """Return what shares the memory of a device with other processes of this host.

        Args:
            device: One that `torch_device` returned.

        Raises:
            DeviceError: There is no such thing here; says why.
        """
        ...
