"""The interface of a device backend: a name, a collective backend, redirects and rules.

Upstream is written for one kind of device and spells it everywhere: `torch.cuda.current_device()`,
`device="cuda"`, `tensor.cuda()`, `backend="nccl"`. A backend makes that spelling mean its own
device by *redirects*: plain attribute assignments into torch, listed as data. A backend never
assigns anything itself; `megatron_ext.patches.device` turns the table into registry patches, so
every redirect is listed by `megatron-ext patches list` and undone by `deactivate()`.

Only code that requests a CUDA device is translated. No tensor claims to live where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Redirect:
    """One attribute outside this package that gets another value while the backend is armed.

    Args:
        target: `module:attribute.path`, as in `megatron_ext.patches.registry.Patch`.
        make: Called once, when the redirect is installed, with the value that is there now (`None`
            with `creates`); returns the new value.
        reason: One sentence for `megatron-ext patches list`.
        creates: The attribute does not exist in this torch; installing adds it, undoing removes it.
    """

    target: str
    # With the original as an argument, tables have no references to torch, and can be built before
    # torch is imported.
    make: Callable[[Any], object]
    reason: str
    creates: bool = False


class TimingEvent(Protocol):
    """A mark in a device stream; it completes after all work queued before it."""

    def record(self) -> None:
        """Put the mark into the current stream."""

    def synchronize(self) -> None:
        """Sleep until the mark completes.

        Raises:
            RuntimeError: The device failed, in work before the mark.
        """

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this mark to another; both must have completed."""


class Copied(Protocol):
    """The completion of a copy."""

    def wait(self) -> None:
        """Sleep until the copy is done; callable from any thread.

        Raises:
            RuntimeError: The device failed, in this copy or in earlier work.
        """


class Copies(Protocol):
    """Copies between host and device that overlap with computation.

    Both directions are asynchronous and return a completion. Until it is reached, the source must
    not change, and only work on the device may use the copy.
    """

    def to_host(
        self, tensor: torch.Tensor, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Copied]:
        """Copy a contiguous device tensor after all work queued before.

        Args:
            tensor: The source.
            target: Where to, in memory that `pin` has registered; None: new pinned memory.
        """

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        """Copy a host tensor; work queued after this call sees the copy."""

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register host memory (whole pages) with the device; return whether it succeeded.

        If not, this logs a warning, and copies from there block.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is freed."""


@dataclass
class SharedBuffer:
    """Device memory that its owner writes and one other process reads."""

    num_bytes: int
    handle: bytes
    """Opaque bytes for the other process: for its `open`, or for the owner's `attach`."""
    address: int
    storage: torch.UntypedStorage
    """A non-owning view of the same bytes."""
    used: Any
    """Event of this process: its last write or read is done."""
    used_there: Any = None
    """The same event of the other process, once this process has opened it."""


class Sharing(Protocol):
    """Device memory shared between processes of one host.

    Owner and reader take turns: after `push` the owner notifies the reader, which calls `pull` and
    notifies the owner, which may `push` again once `is_read`. Neither call blocks: `pull` makes its
    device wait for the push. Errors of the driver raise RuntimeError with the driver's text.
    """

    name: str
    """Name of the device, valid in all processes of the host."""

    def why_unreachable(self, name: str) -> str | None:
        """Return why this process cannot read the memory of a device, or None if it can."""

    def make(self, num_bytes: int) -> SharedBuffer:
        """Allocate memory of at least that size, which another process can open."""

    def open(self, handle: bytes) -> SharedBuffer:
        """Map a buffer of another process."""

    def attach(self, buffer: SharedBuffer, handle: bytes) -> None:
        """Know when the reader of an own buffer has read it, by the handle that `open` created."""

    def is_read(self, buffer: SharedBuffer) -> bool:
        """Return whether the device of an own buffer's reader has copied the last message out."""

    def push(self, buffer: SharedBuffer, tensor: torch.Tensor) -> None:
        """Copy a tensor into an own buffer after all queued work; the caller may free it."""

    def pushed(self, buffer: SharedBuffer) -> Copied:
        """Return the completion of the last `push` into a buffer, until the next one."""

    def pull(
        self, buffer: SharedBuffer, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Copy a tensor out of another process's buffer; work queued later sees it."""

    def copied(self) -> Copied:
        """Return the completion of all copies of this process."""

    def free(self, buffer: SharedBuffer) -> None:
        """Free an own buffer that no other process has mapped any more."""

    def unmap(self, buffer: SharedBuffer) -> None:
        """Unmap the buffer of another process."""


class Device(Protocol):
    """A device backend. Instances are stateless; the constructor does not import torch."""

    name: str
    """Name for users: `cpu`, `cuda` or `musa`."""

    distributed_backend: str
    """Backend name for `torch.distributed.init_process_group`."""

    reaches_peers: bool
    """Whether this backend moves tensors between devices of one host without host memory."""

    environment: Mapping[str, tuple[str, str]]
    """Environment variable -> (value, reason), set at arming unless the user has set it."""

    argument_defaults: Mapping[str, tuple[object, str]]
    """Upstream argument (dest) -> (value, reason). Becomes the parser's default. An explicit flag
    with another value is refused with the reason, or taken if there is none, except
    `distributed_backend`, which is corrected with a logged notice."""

    known_lacks: tuple[str, ...]
    """Beginnings (regular expressions) of warnings about what such a device cannot have. One rank
    shows each of them once."""

    def missing(self) -> str | None:
        """Return why this machine cannot run the backend (with a remedy), or `None` if it can.

        If they differ, the software stack decides, not the hardware.
        """

    def redirects(self) -> Iterable[Redirect]:
        """List the backend's redirects. May import torch and the device's own package."""

    def argument_errors(self, args: Any) -> list[str]:
        """Return the mistakes in parsed upstream arguments on this device; empty if none."""

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return the device of the process with this local rank."""

    def bind(self, local_rank: int) -> None:
        """Make `torch_device(local_rank)` this process's current device."""

    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this process on the device so far."""

    def timing_event(self) -> TimingEvent | None:
        """Return a new mark for the device's stream; `None` if the device is the host."""

    def copies(self, device: torch.device) -> Copies | None:
        """Return the copier between host and `torch_device`; `None` if the device is the host."""

    def sharing(self, device: torch.device) -> Sharing:
        """Return the means to share memory of `torch_device` with other processes of this host.

        Raises:
            DeviceError: The device cannot share memory; the message says why.
        """


class Accelerator:
    """The part of `Device` that is the same for GPUs of all makers: torch has a module for each."""

    name: str

    @property
    def runtime(self) -> Any:
        """`torch.cuda`, or the module with the same interface."""
        import torch

        # By name: torch's stubs know no other than `cuda`, and extensions add theirs when imported.
        return vars(torch)[self.name]

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return GPU `local_rank` of this host."""
        import torch

        return torch.device(self.name, local_rank)

    def bind(self, local_rank: int) -> None:
        """Make GPU `local_rank` current."""
        self.runtime.set_device(local_rank)

    def synchronize(self) -> None:
        """Wait for the current GPU."""
        self.runtime.synchronize()

    def peak_memory_bytes(self) -> int:
        """Return the peak that torch's allocator has handed out."""
        return int(self.runtime.max_memory_allocated())

    def timing_event(self) -> TimingEvent:
        """Return an event of the GPU's clock; a thread that waits for it sleeps."""
        # blocking: by default that thread would spin on a core.
        event: TimingEvent = self.runtime.Event(enable_timing=True, blocking=True)
        return event
