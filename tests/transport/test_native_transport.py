"""The transport of the native core, between real ranks, on every wire that one host has."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore

from megatron_ext.errors import (
    MessageMismatch,
    PeerAborted,
    PeerClosed,
    PeerDied,
    TransportError,
    TransportTimeout,
)
from megatron_ext.transport.base import Expected, Key
from megatron_ext.transport.native_transport import NativeTransport
from tests.ranks import run_ranks, start_ranks

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire

pytestmark = pytest.mark.usefixtures("native")

_CPU = torch.device("cpu")
_SLOT_BYTES = 4096
_LONG_S = 60.0
_DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.int64, torch.uint8,
]  # fmt: skip


_WIRES: tuple[Wire, ...] = ("shm", "tcp")


def _on_each_wire(body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a body on a rank, once for each wire: starting ranks costs more than most bodies."""
    return [body(wire, *args) for wire in _WIRES]


def _rank() -> int:
    return int(os.environ["RANK"])


def _store() -> FileStore:
    """The ranks of a run share their working directory."""
    return FileStore("addresses", int(os.environ["WORLD_SIZE"]))


def _open(
    wire: Wire, run_id: str = "test", *, slots: int = 8, checksums: bool = True
) -> NativeTransport:
    """Connect every rank to every other, with slots so small that long messages are quick.

    A run has one transport for each wire; what the one published is not the other's.
    """
    return NativeTransport(
        _store(), _rank(), range(int(os.environ["WORLD_SIZE"])), run_id=f"{run_id}/{wire}",
        device=_CPU,
        wire=wire, slots=slots, slot_bytes=_SLOT_BYTES, checksums=checksums,
    )  # fmt: skip


def _tensor(key: Key, source: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes that both sides can make."""
    seed = hash((key.kind == "B", key.stage, key.microbatch, source)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit: random bytes can be NaN."""
    same = (left.shape, left.dtype) == (right.shape, right.dtype)
    bits = [t.reshape(-1).view(torch.uint8) for t in (left, right) if t.numel()]
    return same and (not bits or torch.equal(*bits))


def _shape(chooser: random.Random) -> tuple[int, ...]:
    num_elements = chooser.choice([0, 1, 7, 500, 1024, 5000, 40000])
    return chooser.choice([(num_elements,), (1, num_elements, 1), (num_elements, 1)])


def _exchange(transport: NativeTransport, num_messages: int, seed: int) -> int:
    """One step: all send everything to all, then take it in an order of their own."""
    me, size = _rank(), int(os.environ["WORLD_SIZE"])
    chooser = random.Random(seed)
    plan = [
        Expected(source, Key(chooser.choice("FB"), target, i), _shape(chooser), dtype)
        for source in range(size)
        for target in range(size)
        for i in range(num_messages)
        for dtype in [chooser.choice(_DTYPES)]
    ]
    transport.begin([item for item in plan if item.key.stage == me], num_messages)
    mine = [item for item in plan if item.source == me]
    own_order = random.Random(1000 * seed + me)
    own_order.shuffle(mine)
    for _, key, shape, dtype in mine:
        assert shape is not None
        tensor = _tensor(key, me, shape, dtype)
        transport.isend(tensor, key.stage, key)
        tensor.data = torch.empty(0, dtype=dtype)  # what freeing an output does
    inbound = [item for item in plan if item.key.stage == me]
    own_order.shuffle(inbound)
    kept = []  # held to the end, so slots run out
    for source, key, shape, dtype in inbound:
        assert shape is not None
        received = transport.recv(source, key, _LONG_S)
        assert _equal(received, _tensor(key, source, shape, dtype)), f"{key} from rank {source}"
        kept.append(received)
    transport.flush(_LONG_S)
    for tensor, (source, key, shape, dtype) in zip(kept, inbound, strict=True):
        assert shape is not None
        assert _equal(tensor, _tensor(key, source, shape, dtype))
    return len(kept)


def _any_order(wire: Wire, num_messages: int, slots: int) -> int:
    transport = _open(wire, slots=slots)
    count = sum(_exchange(transport, num_messages, seed) for seed in range(3))
    transport.close()
    return count


@pytest.mark.parametrize(
    ("num_ranks", "num_messages", "slots"), [(2, 400, 8), (4, 60, 2), (8, 16, 2)]
)
def test_messages_of_all_kinds_are_taken_in_any_order(num_ranks, num_messages, slots) -> None:
    """More than 10000 messages on each wire, all parameters together."""
    taken = run_ranks(num_ranks, _on_each_wire, _any_order, num_messages, slots)
    assert taken == [[3 * num_ranks * num_messages] * len(_WIRES)] * num_ranks


def _generated_orders(wire: Wire) -> None:
    transport = _open(wire, slots=2, checksums=False)

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(
        sizes=st.lists(st.integers(0, 3 * _SLOT_BYTES), max_size=12),
        taken_by=st.randoms(use_true_random=False),
    )
    def check(sizes: list[int], taken_by: random.Random) -> None:
        peer = 1 - _rank()
        keys = [Key("F", 0, i) for i in range(len(sizes))]
        plan = [Expected(peer, key, (n,), torch.uint8) for key, n in zip(keys, sizes, strict=True)]
        transport.begin(plan, 1)
        for _, key, shape, dtype in plan:
            assert shape is not None
            transport.isend(_tensor(key, _rank(), shape, dtype), peer, key)
        taken_by.shuffle(plan)
        for source, key, shape, dtype in plan:
            assert shape is not None
            assert _equal(transport.recv(source, key, _LONG_S), _tensor(key, source, shape, dtype))
        transport.flush(_LONG_S)

    check()
    transport.close()


def test_sizes_and_orders_are_free() -> None:
    run_ranks(2, _on_each_wire, _generated_orders)


def _poll(wire: Wire) -> list[int]:
    transport = _open(wire)
    order = []
    if _rank() == 0:
        keys = [Key("B", 0, i) for i in (3, 1, 2)]
        transport.begin([], 1)
        for key in keys:
            transport.isend(torch.ones(3), 1, key)
            time.sleep(0.05)
        transport.begin([Expected(1, keys[0], None, torch.float32)], 1)
        transport.recv(1, keys[0], _LONG_S)
    else:
        keys = [Key("B", 0, i) for i in range(1, 4)]
        transport.begin([Expected(0, key, None, torch.float32) for key in keys], 1)
        assert transport.recv(0, keys[2], _LONG_S).tolist() == [1, 1, 1]  # so it is not told
        while len(order) < 2:
            arrived = transport.poll(_LONG_S)
            assert arrived
            order += [key.microbatch for key in arrived]
        assert transport.poll(0.05) == []
        for key in keys[:2]:
            transport.recv(0, key, 0)
        transport.begin([], 1)
        transport.isend(torch.ones(1), 0, Key("B", 0, 3))
    transport.flush(_LONG_S)
    transport.close()
    return order


def test_a_poll_wakes_up_and_tells_each_message_once() -> None:
    assert run_ranks(2, _on_each_wire, _poll) == [[[], []], [[1, 2], [1, 2]]]


def _ahead(wire: Wire) -> None:
    """Rank 0 is a step ahead; its messages are held back until rank 1 gets there."""
    transport = _open(wire)
    sent, received = Path(f"{wire} sent"), Path(f"{wire} received")
    key = Key("F", 1, 0)
    if _rank() == 0:
        for step in (1.0, 2.0):
            transport.begin([], 1)
            transport.isend(torch.full((2,), step), 1, key)
        sent.touch()
        while not received.exists():
            time.sleep(0.02)
    else:
        while not sent.exists():
            time.sleep(0.02)
        for step in (1.0, 2.0):
            transport.begin([Expected(0, key, (2,), torch.float32)], 1)
            assert transport.poll(_LONG_S) == [key]
            assert transport.poll(0.05) == []
            assert transport.recv(0, key, 0).tolist() == [step, step]
        received.touch()
    transport.close()


def test_messages_of_the_next_step_are_held_back() -> None:
    run_ranks(2, _on_each_wire, _ahead)


def _silent_peer(wire: Wire) -> list[str]:
    transport = _open(wire)
    messages = []
    done = Path(f"{wire} done")
    transport.begin([Expected(0, Key("F", 3, 7), None, torch.float32)] * _rank(), 1)
    if _rank() == 1:
        with pytest.raises(TransportTimeout) as raised:
            transport.recv(0, Key("F", 3, 7), 0.2)
        messages.append(str(raised.value))
        for i in range(20):
            transport.isend(
                torch.ones(_SLOT_BYTES if wire == "shm" else 1 << 20), 0, Key("B", 2, i)
            )
        with pytest.raises(TransportTimeout) as raised:
            transport.flush(0.2)
        messages.append(str(raised.value))
        done.touch()
    else:
        while not done.exists():
            time.sleep(0.02)
    transport.close()
    return messages


def test_a_time_out_names_message_peer_and_links() -> None:
    host = re.escape(socket.gethostname())
    told = run_ranks(2, _on_each_wire, _silent_peer)[1]
    for wire, (received, flushed) in zip(_WIRES, told, strict=True):
        assert re.search(
            r"the activation that stage 3 needs for micro-batch 7 did not come from rank 0: waited "
            rf"0\.[2-9] s \(tag 0x[0-9a-f]+\) of 0\.2 s; rank 0 on host {host} \(wire {wire}\) is "
            r"open: 0 messages arrived and not taken, 0 of 8 slots in use",
            received,
        )
        assert "rank 0 did not take what was sent to it" in flushed
        assert re.search(r"[1-9]\d* messages to it queued", flushed)
    assert "18 messages to it queued" in told[0][1]  # 8 slots took two messages of 4 pieces


def _wait_for_ever(transport: NativeTransport, waiting: str) -> None:
    """Longer than a run may last, so nothing but an error ends it."""
    if waiting == "recv":
        transport.recv(1, Key("F", 0, 0), 1000)
    while waiting == "poll":
        transport.poll(1000)
    while waiting == "isend":
        transport.isend(torch.ones(2 * _SLOT_BYTES), 1, Key("F", 1, 0))
        transport.flush(1000)


def _killed(wire: Wire, waiting: str) -> str:
    transport = _open(wire)
    transport.begin([Expected(1, Key("F", 0, 0), None, torch.float32)] * (_rank() == 0), 1)
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if _rank() == 2:
        transport.close()
        return ""
    with pytest.raises(PeerDied) as raised:
        _wait_for_ever(transport, waiting)
    transport.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("wire", "waiting"),
    [("shm", "recv"), ("shm", "poll"), ("shm", "isend"), ("tcp", "recv"), ("tcp", "isend")],
)
def test_a_killed_peer_is_named(wire, waiting) -> None:
    run = start_ranks(3, _killed, wire, waiting)
    assert run.exit_codes == [0, -signal.SIGKILL, 0], run.describe()
    assert f"rank 1 on host {socket.gethostname()} (wire {wire}) died" in run.values[0]
    if waiting == "recv":
        assert run.values[0].startswith("the activation that stage 0 needs for micro-batch 0")


def _killed_parent_of_workers(wire: Wire) -> None:
    """Data loader workers outlive their parent for a while."""
    transport = _open(wire)
    transport.begin([Expected(1, Key("F", 0, 0), None, torch.float32)] * (_rank() == 0), 1)
    if _rank() == 1:
        if os.fork() == 0:
            with pytest.raises(TransportError, match="cannot be used by its forked child"):
                transport.isend(torch.ones(1), 0, Key("F", 0, 0))
            Path("worker").touch()
            signal.pause()
        while not Path("worker").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDied, match=rf"rank 1 on host .* \(wire {wire}\) died"):
        transport.recv(1, Key("F", 0, 0), 1000)


@pytest.mark.parametrize("wire", _WIRES)
def test_a_killed_peer_is_noticed_though_its_workers_live(wire) -> None:
    run = start_ranks(2, _killed_parent_of_workers, wire)
    assert run.exit_codes == [0, -signal.SIGKILL], run.describe()


def _aborting(wire: Wire) -> str:
    transport = _open(wire)
    key = Key("F", 0, 0)
    transport.begin([Expected(1, key, None, torch.float32)], 1)
    if _rank() == 1:
        transport.abort("ran out of memory")
        with pytest.raises(TransportError, match="given up: ran out of memory"):
            transport.isend(torch.ones(1), 0, key)
        transport.abort("again")
        transport.close()
        return ""
    with pytest.raises(PeerAborted) as raised:
        transport.recv(1, key, 1000)
    with pytest.raises(PeerAborted):
        transport.poll(1000)
    transport.close()
    return str(raised.value)


def test_the_reason_for_giving_up_reaches_the_peers() -> None:
    for message in run_ranks(2, _on_each_wire, _aborting)[0]:
        assert "did not come from rank 1" in message
        assert "gave up: rank 1: ran out of memory" in message


def _farewell(wire: Wire) -> None:
    transport = _open(wire)
    keys = [Key("F", 0, i) for i in range(2)]
    if _rank() == 1:
        transport.begin([], 1)
        transport.isend(torch.ones(5), 0, keys[0])
        transport.close()
        return
    transport.begin([Expected(1, key, None, torch.float32) for key in keys], 2)
    with pytest.raises(
        PeerClosed, match=rf"rank 1 on host .* \(wire {wire}\) closed its transport"
    ):
        transport.recv(1, keys[1], 1000)
    kept = transport.recv(1, keys[0], 0)
    with pytest.raises(PeerClosed, match="cannot be sent to rank 1"):
        transport.isend(kept, 1, keys[0])
    with pytest.raises(PeerClosed, match="all peers closed"):
        transport.poll(1000)
    transport.close()
    transport.close()
    assert kept.sum().item() == 5  # its memory is still there
    with pytest.raises(TransportError, match="the transport is closed"):
        transport.begin([], 1)


def test_a_farewell_comes_after_the_last_message() -> None:
    run_ranks(2, _on_each_wire, _farewell)


def _descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def _leaves_nothing(wire: Wire) -> None:
    _open(wire, "first").close()  # /dev/null is opened once, for forked children
    before = _descriptors()
    for turn in range(3):
        transport = _open(wire, f"turn {turn % 2}")  # also under the run id of a former one
        _exchange(transport, 10, turn)
        transport.close()
        assert _descriptors() == before
    assert "memfd:megatron_ext" not in Path("/proc/self/maps").read_text()


def test_nothing_is_left_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    run_ranks(3, _on_each_wire, _leaves_nothing)
    run = start_ranks(3, _killed, "auto", "recv")
    assert run.exit_codes == [0, -signal.SIGKILL, 0], run.describe()
    new = {path.name for path in Path("/dev/shm").iterdir()} - {path.name for path in before}
    assert [name for name in new if "megatron_ext" in name or "mext" in name] == []


def _misuse() -> None:
    transport = _open("shm")
    me, peer = _rank(), 1 - _rank()
    key = Key("B", 0, 0)
    transport.begin([Expected(peer, key, (3,), torch.float32)], slots=1)
    with pytest.raises(TransportError, match="is not expected from rank"):
        transport.recv(peer, Key("B", 0, 1), 1)
    with pytest.raises(TransportError, match="of the step before was never received"):
        transport.begin([], slots=1)
    with pytest.raises(TransportError, match="at most 4096 stages"):
        transport.isend(torch.ones(1), peer, Key("F", 5000, 0))
    with pytest.raises(TransportError, match="tensors on meta cannot be sent by the native core"):
        transport.isend(torch.ones(1, device="meta"), peer, key)
    with pytest.raises(TransportError, match="quint8 cannot be sent"):
        transport.isend(torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.quint8), peer, key)
    with pytest.raises(ValueError, match=f"rank {me} has no link to rank 7"):
        transport.isend(torch.ones(1), 7, key)
    transport.isend(torch.ones(3).bfloat16(), peer, key)
    with pytest.raises(MessageMismatch, match=r"shape \(3,\) and torch.bfloat16, expected shape"):
        transport.recv(peer, key, _LONG_S)
    stats = transport.stats()
    assert (stats.messages, stats.bytes) == (1, 6)
    transport.close()


def test_misuse_is_told() -> None:
    run_ranks(2, _misuse)


def test_other_devices_are_refused(tmp_path) -> None:
    with pytest.raises(TransportError, match=r"cuda:0 cannot .* StagedTransport"):
        NativeTransport(
            FileStore(str(tmp_path / "store"), 1), 0, [], run_id="x", device=torch.device("cuda:0")
        )


def test_a_rank_without_peers_sends_to_itself(tmp_path) -> None:
    transport = NativeTransport(
        FileStore(str(tmp_path / "store"), 1), 0, [], run_id="x", device=_CPU
    )
    key = Key("F", 1, 0)
    transport.begin([Expected(0, key, (2, 2), torch.float64)], 1)
    transport.isend(torch.eye(2, dtype=torch.float64), 0, key)
    assert transport.poll(_LONG_S) == [key]
    received = transport.recv(0, key, 0)
    assert torch.equal(received, torch.eye(2, dtype=torch.float64))
    assert received._base is None
    assert received.requires_grad_().is_leaf
    transport.close()


def _two_jobs(wire: Wire) -> None:
    """Ranks 0 and 1 are one job, 2 and 3 another one that uses the same store and keys."""
    job, me = divmod(_rank(), 2)
    transport = NativeTransport(
        _store(), me, [1 - me], run_id=f"{wire} {job}", device=_CPU, wire=wire, slots=2
    )
    keys = [Key("F", 0, i) for i in range(50)]
    transport.begin([Expected(1 - me, key, (100,), torch.int64) for key in keys], 1)
    for key in keys:
        transport.isend(torch.full((100,), 1000 * job + key.microbatch), 1 - me, key)
    for key in reversed(keys):
        received = transport.recv(1 - me, key, _LONG_S)
        assert received.unique().tolist() == [1000 * job + key.microbatch]
    transport.flush(_LONG_S)
    transport.close()


def test_two_jobs_at_once_do_not_meet() -> None:
    run_ranks(4, _on_each_wire, _two_jobs)


def _busy_sender(wire: Wire) -> None:
    """Rank 0 calls nothing while its messages, for which there was no room, go on."""
    transport = _open(wire, slots=2)
    keys = [Key("F", 1, i) for i in range(3)]
    taken = Path(f"{wire} taken")
    shape = (1 << 20,)
    if _rank() == 0:
        transport.begin([], 3)
        for key in keys:
            transport.isend(torch.ones(shape), 1, key)
        while not taken.exists():
            time.sleep(0.01)
        transport.flush(0)
    else:
        transport.begin([Expected(0, key, shape, torch.float32) for key in keys], 3)
        for key in keys:
            assert transport.recv(0, key, _LONG_S).sum().item() == 1 << 20
        taken.touch()
    transport.close()


def test_queued_messages_go_on_while_their_sender_computes() -> None:
    run = start_ranks(2, _on_each_wire, _busy_sender)
    assert run.exit_codes == [0, 0], run.describe()
    for log in run.logs:  # of both transports
        assert log.count("some will wait at their sender, and cross while it computes") == 2
