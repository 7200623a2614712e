"""Other processes for the tests of the native core."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native

_PREAMBLE = """
import os, signal, socket, sys
from megatron_ext.transport.native import require_native
_C = require_native()
sock = socket.socket(fileno=int(sys.argv[1]))
def say(byte): sock.sendall(byte)
def hear(): return sock.recv(1)
"""


class Peer:
    """A Python process that runs `code`, and our end of a unix socket to it.

    The code finds the native module as `_C`, its end as `sock`, and `say(b"x")` and `hear()` for
    one-byte messages. It inherits nothing else: what it shares with us went through the socket.
    """

    def __init__(self, code: str) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PREAMBLE + textwrap.dedent(code), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "MEGATRON_EXT_DISABLE": "1"},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> bytes:
        """The next byte that the process says, b"" if it is gone."""
        return self.sock.recv(1)

    def say(self, byte: bytes) -> None:
        self.sock.sendall(byte)

    def wait_until_asleep(self) -> None:
        """Return once the process sleeps in the kernel; what it said before tells where."""
        while _state(self.pid) != "S":
            assert self.process.poll() is None, "the process ended instead of waiting"

    def join(self) -> None:
        """Wait for the end of the process, which has to be a good one."""
        _, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, stderr

    def kill(self) -> None:
        """End the process by SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        self.sock.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The native module; where it had to be built, its absence is a failure and not a skip."""
    try:
        return require_native()
    except TransportError as error:
        if os.environ.get("MEGATRON_EXT_REQUIRE_NATIVE"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def start_peer(native: ModuleType) -> Iterator[Callable[[str], Peer]]:
    """Starts processes; all are gone at the end of the test."""
    peers: list[Peer] = []

    def start(code: str) -> Peer:
        peers.append(Peer(code))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
