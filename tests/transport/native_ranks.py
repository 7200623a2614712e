"""Ranks that communicate over the native transport, on every wire available on one host."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import FileStore

from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.native_transport import NativeTransport

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire

CPU = torch.device("cpu")
SLOT_BYTES = 4096
LONG_S = 60.0
_DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.complex32, torch.bool, torch.int64, torch.uint8,
]  # fmt: skip
WIRES: tuple[Wire, ...] = ("shm", "tcp")


def on_each_wire(body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on a rank, once per wire: starting ranks costs more than most tests."""
    return [body(wire, *args) for wire in WIRES]


def rank() -> int:
    return int(os.environ["RANK"])


@functools.cache
def store() -> FileStore:
    """Return a store for the ranks of a run, which share their working directory.

    A process uses one store for all transports: when the stores of all processes are gone, torch
    deletes the file, and a store that opens it at that moment would wait forever.
    """
    return FileStore("addresses", int(os.environ["WORLD_SIZE"]))


def open_transport(
    wire: Wire,
    run_id: str = "test",
    *,
    slots: int = 8,
    checksums: bool = True,
    for_device: bool = False,
) -> NativeTransport:
    """Connect every rank to every other; slots are small, so that long messages test quickly.

    A run has one transport per wire, and they must not see each other's published addresses.
    """
    return NativeTransport(
        store(), rank(), range(int(os.environ["WORLD_SIZE"])), run_id=f"{run_id}/{wire}",
        wire=wire, slots=slots, slot_bytes=SLOT_BYTES, checksums=checksums,
        for_device=for_device,
    )  # fmt: skip


def tensor_of(
    key: Message, source: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return random bytes that both sides can generate."""
    seed = hash((key.kind == "B", key.stage, key.microbatch, source)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return (
        values.view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)
    )


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bit by bit, because random bytes can be NaN."""
    same = (left.shape, left.dtype) == (right.shape, right.dtype)
    bits = [t.reshape(-1).view(torch.uint8) for t in (left, right) if t.numel()]
    return same and (not bits or torch.equal(*bits))


def _shape(chooser: random.Random) -> tuple[int, ...]:
    num_elements = chooser.choice([0, 1, 7, 500, 1024, 5000, 40000])
    return chooser.choice([(num_elements,), (1, num_elements, 1), (num_elements, 1)])


def exchange(transport: NativeTransport, num_messages: int, seed: int) -> int:
    """Run one step: send everything to all ranks, then receive in a rank-specific order."""
    me, size = rank(), int(os.environ["WORLD_SIZE"])
    chooser = random.Random(seed)
    plan = [
        Expected(
            source, Message(chooser.choice("FB"), target, i), _shape(chooser), dtype
        )
        for source in range(size)
        for target in range(size)
        for i in range(num_messages)
        for dtype in [chooser.choice(_DTYPES)]
    ]
    transport.begin([item for item in plan if item.message.stage == me], num_messages)
    outbound = [item for item in plan if item.source == me]
    own_order = random.Random(1000 * seed + me)
    own_order.shuffle(outbound)
    for _, key, shape, dtype, _ in outbound:
        assert shape is not None
        tensor = tensor_of(key, me, shape, dtype)
        transport.isend(tensor, key.stage, key)
        tensor.data = torch.empty(0, dtype=dtype)  # the effect of freeing an output
    inbound = [item for item in plan if item.message.stage == me]
    own_order.shuffle(inbound)
    received_tensors = []  # kept to the end, so that slots run out
    for source, key, shape, dtype, _ in inbound:
        assert shape is not None
        received = transport.recv(source, key, LONG_S)
        assert equal(received, tensor_of(key, source, shape, dtype)), (
            f"{key} from rank {source}"
        )
        received_tensors.append(received)
    transport.flush(LONG_S)
    for tensor, (source, key, shape, dtype, _) in zip(
        received_tensors, inbound, strict=True
    ):
        assert shape is not None
        assert equal(tensor, tensor_of(key, source, shape, dtype))
    return len(received_tensors)
