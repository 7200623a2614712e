"""The TCP wire between two hosts; here they are network namespaces with a cable between them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import FileStore

from megatron_ext.errors import PeerDied, TransportError
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.native_transport import NativeTransport
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire

pytestmark = pytest.mark.usefixtures("native")

IPS = ("10.213.78.1", "10.213.78.2")
_CLONE_NEWNET = 0x40000000
_LONG_S = 60.0
_SILENCE_S = 2.0


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=check, timeout=60
    )


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, linked."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip(
            "network namespaces need root and the program ip (Debian: iproute2)"
        )
    names = [f"megatron-ext-{os.getpid()}-{side}" for side in "ab"]
    made = _run("ip", "netns", "add", names[0], check=False)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made: {made.stderr.strip()}")
    try:
        _run("ip", "netns", "add", names[1])
        _run(
            "ip", "link", "add", "cable", "netns", names[0],
            "type", "veth", "peer", "name", "cable", "netns", names[1],
        )  # fmt: skip
        for name, ip in zip(names, IPS, strict=True):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            _run("ip", "netns", "del", name, check=False)


def _enter(host: str) -> None:
    with Path(f"/run/netns/{host}").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(
            ctypes.get_errno()
        )


def _open(store: FileStore, rank: int, wire: Wire) -> NativeTransport:
    return NativeTransport(
        store, rank, [1 - rank], run_id=wire,
        wire=wire, ip=IPS[rank], silence_s=_SILENCE_S, checksums=True,
    )  # fmt: skip


def _exchange(transport: NativeTransport, peer: int) -> None:
    """Messages longer than the buffers of the sockets, taken in the opposite order."""
    shapes = [(0,), (3,), (1 << 22,), (100, 1000), (1 << 20,)]
    keys = [Message("F", 0, i) for i in range(len(shapes))]
    plan = [
        Expected(peer, key, shape, torch.float32)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    transport.begin(plan, len(plan))
    for _, key, shape, *_ in plan:
        transport.isend(torch.full(shape, key.microbatch + 0.5), peer, key)
    for _, key, *_ in reversed(plan):
        received = transport.recv(peer, key, _LONG_S)
        assert bool((received == key.microbatch + 0.5).all())
    transport.flush(_LONG_S)


def _pull_the_cable(hosts: list[str]) -> str:
    rank = int(os.environ["RANK"])
    _enter(hosts[rank])
    store = FileStore("addresses", 2)
    with pytest.raises(
        TransportError, match=r"another network namespace; .*-transport auto"
    ):
        _open(store, rank, "shm")
    with pytest.raises(TransportError, match=r"over RDMA: host .* has no RDMA: "):
        _open(store, rank, "rdma")
    transport = _open(store, rank, "auto")
    _exchange(transport, 1 - rank)
    late = Message("B", 0, 0)
    transport.begin([Expected(1 - rank, late, None, torch.float32)], 1)
    ready = Path("ready")
    if rank == 0:
        while not ready.exists():
            time.sleep(0.01)
        _run("ip", "link", "set", "cable", "down")
        transport.isend(torch.ones(1), 1, late)
    ready.touch()
    with pytest.raises(PeerDied) as raised:
        transport.recv(1 - rank, late, _LONG_S)
    transport.close()
    return str(raised.value)


def test_a_pulled_cable_is_a_death(hosts) -> None:
    messages = run_ranks(2, _pull_the_cable, hosts)
    for rank, message in enumerate(messages):
        assert f"rank {1 - rank} on host " in message
        assert "(wire tcp) died (" in message
