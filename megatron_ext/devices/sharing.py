"""Device memory shared by two processes on one host, where one writes and the other reads.

The device's runtime allocates and exports the buffers (`cudaIpcGetMemHandle` and related functions;
the MUSA runtime has the same functions with the prefix `musa`).
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.devices.copies import Copied
from megatron_ext.errors import DeviceError

# Size of a buffer or event handle, which is the same in all versions of both runtimes.
_HANDLE_BYTES = 64

# `open` unpacks this, the buffer's size. The memory handle and the event's handle follow.
_SIZE = struct.Struct("<Q")

# An export covers a whole driver block, and smaller allocations may share a block.
_BLOCK_BYTES = 2 << 20

_OPEN_FROM_PEERS = 1  # cudaIpcMemLazyEnablePeerAccess
_NAME_BYTES = 32

_CALLS = (
    "Malloc", "Free", "IpcGetMemHandle", "IpcOpenMemHandle", "IpcCloseMemHandle",
    "DeviceGetPCIBusId", "DeviceGetByPCIBusId", "GetLastError",
)  # fmt: skip


class _Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@dataclass
class SharedBuffer:
    """Device memory that its owner writes and one other process reads."""

    num_bytes: int
    handle: bytes
    """Opaque bytes for the other process: the reader passes them to `open`, the owner to `attach`.
    """
    address: int
    storage: torch.UntypedStorage
    """A storage that views these bytes without owning them."""
    used: Any
    """This process's event, recorded after its last write or read."""
    used_there: Any = None
    """The other process's `used`, once this process has opened it."""


class Sharing:
    """Shares memory through a runtime with CUDA's interface. All calls come from one thread.

    Owner and reader take turns. After `push`, the owner notifies the reader. The reader calls
    `pull` and notifies the owner, which may `push` again once `is_read` returns True. Neither call
    blocks: after `pull`, the reader's device waits for the push. Driver errors raise RuntimeError
    with the driver's text.

    Args:
        runtime: `torch.cuda`, or a module with the same interface.
        device: This process's device, with its index.
        library: File name of the runtime library, which torch has loaded; its function names start
            with the device type.

    Raises:
        DeviceError: The library does not exist or lacks a function.
    """

    name: str
    """The device's name, valid in all processes on the host."""

    def __init__(self, runtime: Any, device: torch.device, library: str) -> None:
        self._runtime = runtime
        self._device = device
        try:
            loaded = ctypes.CDLL(library)
            self._functions = {
                name: getattr(loaded, device.type + name) for name in _CALLS
            }
            self._error_text = getattr(loaded, f"{device.type}GetErrorString")
        except (OSError, AttributeError) as error:
            raise DeviceError(
                f"device memory cannot be shared between processes: {error}; use "
                f"--pipeline-device-path staged"
            ) from error
        self._error_text.restype = ctypes.c_char_p
        # Use a stream for each direction, apart from the compute stream: a pull that waits for the
        # other process would otherwise delay pushes, and both would delay computation.
        self._out = runtime.Stream(device)
        self._in = runtime.Stream(device)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("DeviceGetPCIBusId", name, _NAME_BYTES, device.index)
        self.name = name.value.decode()

    def why_unreachable(self, name: str) -> str | None:
        """Return why this device cannot read the named device's memory; None if it can."""
        index = ctypes.c_int()
        try:
            self._call("DeviceGetByPCIBusId", ctypes.byref(index), name.encode())
        except RuntimeError as error:
            return (
                f"device {name} is not visible to the process of {self.name} ({error}); make all "
                f"devices of a host visible to all of its ranks"
            )
        own_index = self._device.index
        if index.value == own_index:
            return None
        if not self._runtime.can_device_access_peer(own_index, index.value):
            return (
                f"the driver says that device {self.name} cannot access device {name}"
            )
        return None

    def make(self, num_bytes: int) -> SharedBuffer:
        """Allocate memory of at least this size that another process can open."""
        # torch's allocator cannot be used: its sharing is private and keeps a reference count in a
        # file under /dev/shm that outlives a killed process, and its expandable segments cannot be
        # exported. The driver frees this memory when the last process that maps it has exited.
        # Round up to whole blocks: otherwise an export would include other allocations.
        num_blocks = -(-max(num_bytes, 1) // _BLOCK_BYTES)
        num_bytes = num_blocks * _BLOCK_BYTES
        address = ctypes.c_void_p()
        handle = _Handle()
        arguments = (ctypes.byref(address), ctypes.c_size_t(num_bytes))
        try:
            self._call("Malloc", *arguments)
        except RuntimeError:
            # torch's allocator may hold the missing memory in its cache.
            self._runtime.empty_cache()
            self._call("Malloc", *arguments)
        try:
            self._call("IpcGetMemHandle", ctypes.byref(handle), address)
        except RuntimeError:
            self._call("Free", address)
            raise
        written = self._event()
        head = _SIZE.pack(num_bytes) + bytes(handle)
        return self._buffer(num_bytes, head + written.ipc_handle(), address, written)

    def open(self, handle: bytes) -> SharedBuffer:
        """Map another process's buffer onto this process's device."""
        (num_bytes,) = _SIZE.unpack_from(handle)
        head_bytes = _SIZE.size + _HANDLE_BYTES
        memory = handle[_SIZE.size : head_bytes]
        written = handle[head_bytes:]
        address = ctypes.c_void_p()
        self._call(
            "IpcOpenMemHandle",
            ctypes.byref(address),
            _Handle.from_buffer_copy(memory),
            ctypes.c_uint(_OPEN_FROM_PEERS),
        )
        read_event = self._event()
        buffer = self._buffer(num_bytes, read_event.ipc_handle(), address, read_event)
        self.attach(buffer, written)
        return buffer

    def attach(self, buffer: SharedBuffer, handle: bytes) -> None:
        """Open the reader's event, for `is_read`; `handle` is the reader's buffer handle."""
        with self._runtime.device(self._device):
            opened_event = self._runtime.Event.from_ipc_handle(self._device, handle)
            buffer.used_there = opened_event

    def is_read(self, buffer: SharedBuffer) -> bool:
        """Return whether the reader has copied the last message out of this process's buffer."""
        # None means that no reader has opened the buffer yet.
        return buffer.used_there is None or bool(buffer.used_there.query())

    def push(self, buffer: SharedBuffer, tensor: torch.Tensor) -> None:
        """Copy a tensor into this process's buffer after all queued work.

        The caller may free the tensor as soon as this returns.
        """
        tensor = tensor.detach().to(self._device).contiguous()
        with self._runtime.device(self._device):
            self._out.wait_stream(self._runtime.current_stream(self._device))
            with self._runtime.stream(self._out):
                target = _tensor(buffer, tensor.shape, tensor.dtype)
                target.copy_(tensor, non_blocking=True)
            # If the caller frees the tensor, torch's allocator must not reuse its
            # memory on the current stream before the copy has read it.
            tensor.record_stream(self._out)
            self._out.record_event(buffer.used)

    def pushed(self, buffer: SharedBuffer) -> Copied:
        """Return a handle for waiting on a buffer's last `push`, valid until the next `push`."""
        return Copied(self._runtime, self._device, (buffer.used,))

    def pull(
        self, buffer: SharedBuffer, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Copy a tensor out of another process's buffer. Work queued later sees the result."""
        # Interprocess events order the work on the two devices, as in TensorPipe's CUDA IPC
        # channel, so no host thread waits.
        with self._runtime.device(self._device):
            self._in.wait_event(buffer.used_there)
            with self._runtime.stream(self._in):
                copy = torch.empty(shape, dtype=dtype, device=self._device)
                copy.copy_(_tensor(buffer, shape, dtype), non_blocking=True)
            self._in.record_event(buffer.used)
            current = self._runtime.current_stream(self._device)
            current.wait_stream(self._in)
            copy.record_stream(current)
        return copy

    def copied(self) -> Copied:
        """Return a handle for waiting on all of this process's pushes and pulls."""
        return Copied(self._runtime, self._device, (self._out, self._in))

    def free(self, buffer: SharedBuffer) -> None:
        """Free this process's buffer once no other process maps it."""
        self._call("Free", ctypes.c_void_p(buffer.address))

    def unmap(self, buffer: SharedBuffer) -> None:
        """Unmap another process's buffer."""
        self._call("IpcCloseMemHandle", ctypes.c_void_p(buffer.address))

    def _buffer(
        self,
        num_bytes: int,
        handle: bytes,
        address: ctypes.c_void_p,
        used: Any,
    ) -> SharedBuffer:
        place = address.value or 0
        storage: Any = torch._C._construct_storage_from_data_pointer(
            place, self._device, num_bytes
        )
        return SharedBuffer(num_bytes, handle, place, storage, used)

    def _event(self) -> Any:
        with self._runtime.device(self._device):
            event = self._runtime.Event(interprocess=True, blocking=True)
            event.ipc_handle()  # create the handle while this device is current
        return event

    def _call(self, name: str, *arguments: Any) -> None:
        with self._runtime.device(self._device):
            code = self._functions[name](*arguments)
            if code != 0:
                # Clear the error; otherwise torch would raise it after its next kernel.
                self._functions["GetLastError"]()
                text = self._error_text(code).decode()
                raise RuntimeError(f"{text} (error {code} of {name})")


def _tensor(
    buffer: SharedBuffer, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a contiguous tensor that occupies the first bytes of a buffer."""
    empty = torch.empty(0, dtype=dtype, device=buffer.storage.device)
    return empty.set_(buffer.storage, 0, shape)  # type: ignore[call-overload, no-any-return]
