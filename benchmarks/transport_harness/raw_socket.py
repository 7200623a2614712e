"""A bare socket between two ranks, for `transport.py`."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

__all__ = ["RawSocket"]

_TIMEOUT_S = 60.0


class RawSocket:
    """The least that TCP takes: both ends know what comes, and where it belongs."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(num_bytes))
        self._link = _connected_socket(f"socket-{num_bytes}")

    def start(self, count: int) -> None:
        """Nothing has to be ready."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send the next message."""
        self._link.sendall(memoryview(tensor.numpy()))

    def recv(self) -> object:
        """Receive the next message, to where the one before was."""
        left = self._buffer
        while left:
            num_bytes = self._link.recv_into(left)
            if not num_bytes:
                raise ConnectionError("the other rank ended the connection")
            left = left[num_bytes:]
        return self._buffer

    def finish(self) -> None:
        """All bytes have left."""

    def close(self) -> None:
        """End the connection."""
        self._link.close()


def _connected_socket(name: str) -> socket.socket:
    """Connect the two ranks; rank 0 says in the store where it listens."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_TIMEOUT_S)
            store.set(name, str(listener.getsockname()[1]))
            link, _ = listener.accept()
    else:
        link = socket.create_connection(("127.0.0.1", int(store.get(name))), _TIMEOUT_S)
    link.settimeout(_TIMEOUT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
