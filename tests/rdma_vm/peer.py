"""One of the processes connected over RDMA. It runs in a virtual machine, without torch.

    python peer.py messages RANK ADDRESS_OF_RANK_0 PORT [MESSAGES_TO_EACH [NUMBER_OF_RANKS]]
    python peer.py send|receive RANK ADDRESS_OF_RANK_0 PORT

Each two ranks meet at a separate port, counted from PORT; more than two ranks must run on one
machine. It prints one line of JSON: what it did, or how the other process ended.
"""

from __future__ import annotations

import ctypes
import json
import random
import socket
import sys
import time
import zlib
from itertools import combinations

from megatron_ext.transport.native import require_native

SLOTS, SLOT_BYTES = 8, 64 * 1024
NUM_MESSAGES = 500
"""Messages from each rank to each other rank, by default."""
STREAM_BYTES = 32 * 1024
TIMEOUT_S = 60.0
SILENCE_S = 3.0
UINT8 = 1 << 8 | 8
DTYPES = {UINT8: 1, 0 << 8 | 64: 8, 2 << 8 | 32: 4, 4 << 8 | 16: 2}
"""Codes of uint8, int64, float32 and bfloat16, with their sizes in bytes."""


def tcp_connection(address: str, port: int, *, listens: bool) -> socket.socket:
    """Connect two processes: the first one listens, the second retries until accepted."""
    if listens:
        with socket.create_server((address, port)) as listener:
            listener.settimeout(TIMEOUT_S)
            return listener.accept()[0]
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        connection = socket.socket()
        if connection.connect_ex((address, port)) == 0:
            return connection
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at {address} port {port}")
        time.sleep(0.1)


def open_endpoint(rank: int, num_ranks: int, address: str, port: int):
    native = require_native()
    endpoint = native.Endpoint(rank, SLOTS, SLOT_BYTES, checksums=True)
    links = {}
    for number, both in enumerate(
        combinations(range(num_ranks), 2)
    ):  # same order on all ranks
        if rank in both:
            with tcp_connection(
                address, port + number, listens=rank == both[0]
            ) as connection:
                connection.setblocking(True)
                peer = sum(both) - rank
                links[peer] = native.RdmaLink(
                    endpoint, peer, connection, silence_s=SILENCE_S
                )
    for peer, link in links.items():
        link.connect(TIMEOUT_S)
        endpoint.add(peer, link)
    return endpoint, {peer: link.text for peer, link in links.items()}


def send(endpoint, peer: int, tag: int, data: bytearray, code: int = UINT8) -> None:
    """Send bytes, keeping them alive until the core has sent them."""
    buffer = (ctypes.c_char * len(data)).from_buffer(data) if data else None
    address = ctypes.addressof(buffer) if buffer is not None else 0
    endpoint.send(
        peer, tag, code, (len(data) // DTYPES[code],), address, (data, buffer)
    )


def content(*names: int) -> tuple[int, bytearray]:
    """Return a dtype and bytes; some messages are empty, others need several slots."""
    generator = random.Random(repr(names))
    code = generator.choice(list(DTYPES))
    longest = generator.choice([0, 5000, 5000, 5000, 5000, 5000, 3 * SLOT_BYTES])
    return code, bytearray(generator.randbytes(generator.randint(0, longest) // 8 * 8))


def exchange_messages(
    rank: int, endpoint, peers: list[int], num_messages: int
) -> dict[str, object]:
    """Send to all ranks, and receive in a rank-specific order."""
    begin = time.monotonic()
    for tag in range(num_messages):
        for peer in peers:
            code, data = content(tag, rank, peer)
            send(endpoint, peer, tag, data, code)
    order = [(tag, peer) for tag in range(num_messages) for peer in peers]
    random.Random(rank).shuffle(order)
    bad = []
    num_bytes = 0
    patience_s = (
        TIMEOUT_S + len(order) / 50
    )  # the first message received may be the last one sent
    for tag, peer in order:
        message = endpoint.take(peer, tag, patience_s)
        code, expected = content(tag, peer, rank)
        num_bytes += len(expected)
        if message is None or (message.dtype, bytes(memoryview(message))) != (
            code,
            expected,
        ):
            bad.append((tag, peer))
    flushed = endpoint.flush(TIMEOUT_S)
    return {
        "messages": len(order),
        "bad": bad,
        "bytes": num_bytes,
        "flushed": flushed,
        "seconds": time.monotonic() - begin,
    }


def stream(endpoint, peer: int, *, sends: bool) -> dict[str, object]:
    """Send or receive until the peer is gone; return how that was noticed."""
    data = bytearray(random.Random(1).randbytes(STREAM_BYTES))
    checksum = zlib.crc32(data)
    num_messages = 0
    last = time.monotonic()
    while all(report.state == "open" for report in endpoint.peers()):
        if sends:
            send(endpoint, peer, num_messages, bytearray(data))
            going_on = endpoint.flush(TIMEOUT_S)
        else:
            message = endpoint.take(peer, num_messages, TIMEOUT_S)
            going_on = message is not None
            if going_on and zlib.crc32(memoryview(message)) != checksum:
                raise RuntimeError(f"message {num_messages} is damaged")
        if going_on:
            num_messages += 1
            last = time.monotonic()
        if num_messages == 5:
            print("streams", file=sys.stderr, flush=True)
    [report] = endpoint.peers()
    return {
        "messages": num_messages,
        "state": report.state,
        "reason": report.reason,
        "noticed_s": time.monotonic() - last,
    }


def main() -> None:
    role, rank, address, port = (
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
    )
    num_messages = int(sys.argv[5]) if len(sys.argv) > 5 else NUM_MESSAGES
    num_ranks = int(sys.argv[6]) if len(sys.argv) > 6 else 2
    endpoint, links = open_endpoint(rank, num_ranks, address, port)
    if role == "messages":
        result = exchange_messages(rank, endpoint, list(links), num_messages)
    else:
        result = stream(endpoint, 1 - rank, sends=role == "send")
    endpoint.close()
    print(json.dumps({**result, "links": list(links.values())}), flush=True)


if __name__ == "__main__":
    main()
