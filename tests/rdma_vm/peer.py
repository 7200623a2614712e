"""One of two processes that a link over RDMA joins. Runs in a virtual machine; knows no torch.

    python peer.py messages|send|receive RANK ADDRESS_OF_RANK_0 PORT [NUMBER_OF_MESSAGES]

Prints one line of JSON: what it did, or how the other one ended.
"""

from __future__ import annotations

import ctypes
import json
import random
import socket
import sys
import time
import zlib

from megatron_ext.transport.native import require_native

SLOTS, SLOT_BYTES = 8, 64 * 1024
NUM_MESSAGES = 500
"""Of each, unless said otherwise."""
STREAM_BYTES = 32 * 1024
TIMEOUT_S = 60.0
SILENCE_S = 3.0
CODE = 1 << 8 | 8  # unsigned bytes


def tcp_connection(rank: int, address: str, port: int) -> socket.socket:
    """The first process listens, the second calls until it is heard."""
    if rank == 0:
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


def open_endpoint(rank: int, address: str, port: int):
    native = require_native()
    endpoint = native.Endpoint(rank, SLOTS, SLOT_BYTES, checksums=True)
    with tcp_connection(rank, address, port) as connection:
        connection.setblocking(True)
        link = native.RdmaLink(endpoint, 1 - rank, connection, silence_s=SILENCE_S)
    link.connect(TIMEOUT_S)
    endpoint.add(1 - rank, link)
    return endpoint, link.text


class Sender:
    """Keeps the bytes of a message where they are until the core has them."""

    def __init__(self, endpoint, peer: int) -> None:
        self.endpoint, self.peer = endpoint, peer

    def send(self, tag: int, data: bytearray) -> None:
        buffer = (ctypes.c_char * len(data)).from_buffer(data) if data else None
        address = ctypes.addressof(buffer) if buffer is not None else 0
        self.endpoint.send(self.peer, tag, CODE, (len(data),), address, (data, buffer))


def content(seed: int) -> bytearray:
    generator = random.Random(seed)
    size = 0 if seed % 7 == 0 else generator.randrange(1, 3 * SLOT_BYTES if seed % 5 == 0 else 5000)
    return bytearray(generator.randbytes(size))


def exchange_messages(rank: int, endpoint, num_messages: int) -> dict[str, object]:
    """Both send, and take in an order of their own."""
    peer = 1 - rank
    sender = Sender(endpoint, peer)
    begin = time.monotonic()
    for tag in range(num_messages):
        sender.send(tag, content(tag * 2 + rank))
    order = list(range(num_messages))
    random.Random(rank).shuffle(order)
    bad = []
    num_bytes = 0
    patience_s = TIMEOUT_S + num_messages / 50  # the first one taken may be the last one sent
    for tag in order:
        message = endpoint.take(peer, tag, patience_s)
        expected = content(tag * 2 + peer)
        num_bytes += len(expected)
        if message is None or bytes(memoryview(message)) != expected:
            bad.append(tag)
    flushed = endpoint.flush(TIMEOUT_S)
    return {
        "messages": num_messages,
        "bad": bad,
        "bytes": num_bytes,
        "flushed": flushed,
        "seconds": time.monotonic() - begin,
    }


def stream(endpoint, peer: int, *, sends: bool) -> dict[str, object]:
    """Go on until the peer is gone, and tell how that was noticed."""
    sender = Sender(endpoint, peer)
    data = bytearray(random.Random(1).randbytes(STREAM_BYTES))
    checksum = zlib.crc32(data)
    num_messages = 0
    last = time.monotonic()
    while all(report.state == "open" for report in endpoint.peers()):
        if sends:
            sender.send(num_messages, bytearray(data))
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
    what, rank, address, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    endpoint, text = open_endpoint(rank, address, port)
    if what == "messages":
        count = int(sys.argv[5]) if len(sys.argv) > 5 else NUM_MESSAGES
        result = exchange_messages(rank, endpoint, count)
    else:
        result = stream(endpoint, 1 - rank, sends=what == "send")
    endpoint.close()
    print(json.dumps({**result, "link": text}), flush=True)


if __name__ == "__main__":
    main()
