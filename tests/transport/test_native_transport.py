"""The transport of the native core, between real ranks, on every wire that one host has."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore

from megatron_ext.errors import MessageMismatch, TransportError
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.native_transport import NativeTransport
from tests.ranks import run_ranks, start_ranks
from tests.transport.native_ranks import (
    LONG_S,
    SLOT_BYTES,
    WIRES,
    equal,
    exchange,
    on_each_wire,
    open_transport,
    rank,
    store,
    tensor_of,
)

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire

pytestmark = pytest.mark.usefixtures("native")


def _any_order(wire: Wire, num_messages: int, slots: int) -> int:
    transport = open_transport(wire, slots=slots)
    count = sum(exchange(transport, num_messages, seed) for seed in range(3))
    transport.close()
    return count


@pytest.mark.parametrize(
    ("num_ranks", "num_messages", "slots"),
    [(2, 400, 8), (4, 60, 2), (8, 16, 2), (2, 16, 2400)],
)
def test_messages_of_all_kinds_are_taken_in_any_order(
    num_ranks, num_messages, slots
) -> None:
    """More than 10000 messages on each wire, all parameters together."""
    taken = run_ranks(num_ranks, on_each_wire, _any_order, num_messages, slots)
    assert taken == [[3 * num_ranks * num_messages] * len(WIRES)] * num_ranks


Exchange = tuple[list[int], tuple[list[int], list[int]]]
"""Bytes of each message, and the order in which each of two ranks takes what came."""


def _with_orders(sizes: list[int]) -> st.SearchStrategy[Exchange]:
    order = st.permutations(range(len(sizes)))
    return st.tuples(st.just(sizes), st.tuples(order, order))


def _exchange_in_orders(wire: Wire, exchanges: list[Exchange]) -> None:
    transport = open_transport(wire, slots=2, checksums=False)
    peer = 1 - rank()
    for sizes, orders in exchanges:
        plan = [
            Expected(peer, Message("F", 0, i), (n,), torch.uint8)
            for i, n in enumerate(sizes)
        ]
        transport.begin(plan, 1)
        for _, key, shape, dtype, _ in plan:
            assert shape is not None
            transport.isend(tensor_of(key, rank(), shape, dtype), peer, key)
        for number in orders[rank()]:
            source, key, shape, dtype, _ = plan[number]
            assert shape is not None
            assert equal(
                transport.recv(source, key, LONG_S),
                tensor_of(key, source, shape, dtype),
            )
        transport.flush(LONG_S)
    transport.close()


@settings(max_examples=20, derandomize=True)
@given(
    exchanges=st.lists(
        st.lists(st.integers(0, 3 * SLOT_BYTES), max_size=12).flatmap(_with_orders),
        min_size=1,
        max_size=8,
    )
)
def test_sizes_and_orders_are_free(exchanges: list[Exchange]) -> None:
    run_ranks(2, on_each_wire, _exchange_in_orders, exchanges)


def _poll(wire: Wire) -> list[int]:
    transport = open_transport(wire)
    order = []
    if rank() == 0:
        keys = [Message("B", 0, i) for i in (3, 1, 2)]
        transport.begin([], 1)
        for key in keys:
            transport.isend(torch.ones(3), 1, key)
            time.sleep(0.05)
        transport.begin([Expected(1, keys[0], None, torch.float32)], 1)
        transport.recv(1, keys[0], LONG_S)
    else:
        keys = [Message("B", 0, i) for i in range(1, 4)]
        transport.begin([Expected(0, key, None, torch.float32) for key in keys], 1)
        assert transport.recv(0, keys[2], LONG_S).tolist() == [
            1,
            1,
            1,
        ]  # so it is not told
        while len(order) < 2:
            arrived = transport.poll(LONG_S)
            assert arrived
            order += [key.microbatch for key in arrived]
        assert transport.poll(0.05) == []
        for key in keys[:2]:
            transport.recv(0, key, 0)
        transport.begin([], 1)
        transport.isend(torch.ones(1), 0, Message("B", 0, 3))
    transport.flush(LONG_S)
    transport.close()
    return order


def test_a_poll_wakes_up_and_tells_each_message_once() -> None:
    assert run_ranks(2, on_each_wire, _poll) == [[[], []], [[1, 2], [1, 2]]]


def _ahead(wire: Wire) -> None:
    """Rank 0 is a step ahead; its messages are held back until rank 1 gets there."""
    transport = open_transport(wire)
    sent, received = Path(f"{wire} sent"), Path(f"{wire} received")
    key = Message("F", 1, 0)
    if rank() == 0:
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
            assert transport.poll(LONG_S) == [key]
            assert transport.poll(0.05) == []
            assert transport.recv(0, key, 0).tolist() == [step, step]
        received.touch()
    transport.close()


def test_messages_of_the_next_step_are_held_back() -> None:
    run_ranks(2, on_each_wire, _ahead)


def _misuse() -> None:
    transport = open_transport("shm")
    me, peer = rank(), 1 - rank()
    key = Message("B", 0, 0)
    transport.begin([Expected(peer, key, (3,), torch.float32)], slots=1)
    with pytest.raises(TransportError, match="is not expected from rank"):
        transport.recv(peer, Message("B", 0, 1), 1)
    with pytest.raises(TransportError, match="of the previous step was never received"):
        transport.begin([], slots=1)
    with pytest.raises(TransportError, match="at most 2048 stages"):
        transport.isend(torch.ones(1), peer, Message("F", 5000, 0))
    with pytest.raises(
        TransportError, match="only sends CPU tensors, not those on meta"
    ):
        transport.isend(torch.ones(1, device="meta"), peer, key)
    with pytest.raises(TransportError, match="quint8 cannot be sent"):
        transport.isend(
            torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.quint8), peer, key
        )
    with pytest.raises(ValueError, match=f"rank {me} has no link to rank 7"):
        transport.isend(torch.ones(1), 7, key)
    transport.isend(torch.ones(3).bfloat16(), peer, key)
    with pytest.raises(
        MessageMismatch, match=r"shape \(3,\) and torch.bfloat16, expected shape"
    ):
        transport.recv(peer, key, LONG_S)
    stats = transport.stats()
    assert (stats.messages, stats.bytes) == (1, 6)
    transport.close()


def test_misuse_is_told() -> None:
    run_ranks(2, _misuse)


def test_memory_for_a_device_is_asked_for_when_a_transport_is_opened(tmp_path) -> None:
    transport = NativeTransport(
        FileStore(str(tmp_path / "store"), 1), 0, [], run_id="x"
    )
    with pytest.raises(TransportError, match="for_device=True"):
        transport.fixed_memory()
    transport.close()


def _woken(wire: Wire) -> list[list[Message]]:
    """Poll on rank 1 while another thread wakes it, then for a message that rank 0 sends."""
    transport, key = open_transport(wire), Message("F", 1, 0)
    polls: list[list[Message]] = []
    if rank() == 0:
        transport.begin([], 1)
        time.sleep(0.3)
        transport.isend(torch.ones(3), 1, key)
    else:
        transport.begin([Expected(0, key, None, torch.float32)], 1)
        thread = threading.Timer(0.1, transport.wake)
        thread.start()
        polls.append(list(transport.poll(LONG_S)))
        thread.join()
        transport.wake()
        transport.wake()
        polls += [list(transport.poll(LONG_S)) for _ in range(2)]
        transport.wake()  # left over; the next step is not disturbed
        transport.recv(0, key, LONG_S)
        transport.begin([], 1)
    transport.flush(LONG_S)
    transport.close()
    return polls


def test_another_thread_ends_a_poll() -> None:
    for polls in run_ranks(2, on_each_wire, _woken)[1]:
        assert polls == [[], [], [Message("F", 1, 0)]]


def test_a_rank_without_peers_sends_to_itself(tmp_path) -> None:
    transport = NativeTransport(
        FileStore(str(tmp_path / "store"), 1), 0, [], run_id="x"
    )
    key = Message("F", 1, 0)
    transport.begin([Expected(0, key, (2, 2), torch.float64)], 1)
    transport.isend(torch.eye(2, dtype=torch.float64), 0, key)
    assert transport.poll(LONG_S) == [key]
    received = transport.recv(0, key, 0)
    assert torch.equal(received, torch.eye(2, dtype=torch.float64))
    assert received._base is None
    assert received.requires_grad_().is_leaf
    transport.close()


def _two_jobs(wire: Wire) -> None:
    """Ranks 0 and 1 are one job, 2 and 3 another one that uses the same store and keys."""
    job, me = divmod(rank(), 2)
    transport = NativeTransport(
        store(), me, [1 - me], run_id=f"{wire} {job}", wire=wire, slots=2
    )
    keys = [Message("F", 0, i) for i in range(50)]
    transport.begin([Expected(1 - me, key, (100,), torch.int64) for key in keys], 1)
    for key in keys:
        transport.isend(torch.full((100,), 1000 * job + key.microbatch), 1 - me, key)
    for key in reversed(keys):
        received = transport.recv(1 - me, key, LONG_S)
        assert received.unique().tolist() == [1000 * job + key.microbatch]
    transport.flush(LONG_S)
    transport.close()


def test_two_jobs_at_once_do_not_meet() -> None:
    run_ranks(4, on_each_wire, _two_jobs)


def _busy_sender(wire: Wire) -> None:
    """Rank 0 calls nothing while its messages, for which there was no room, go on."""
    transport = open_transport(wire, slots=2)
    keys = [Message("F", 1, i) for i in range(3)]
    taken = Path(f"{wire} taken")
    shape = (1 << 20,)
    if rank() == 0:
        transport.begin([], 3)
        for key in keys:
            transport.isend(torch.ones(shape), 1, key)
        while not taken.exists():
            time.sleep(0.01)
        transport.flush(0)
    else:
        transport.begin([Expected(0, key, shape, torch.float32) for key in keys], 3)
        for key in keys:
            assert transport.recv(0, key, LONG_S).sum().item() == 1 << 20
        taken.touch()
    transport.close()


def test_queued_messages_go_on_while_their_sender_computes() -> None:
    run = start_ranks(2, on_each_wire, _busy_sender)
    assert run.exit_codes == [0, 0], run.describe()
    for log in run.logs:  # of both transports
        assert (
            log.count("some wait at their sender and are sent while it computes") == 2
        )


def _lazy_signs(wire: Wire) -> None:
    transport = open_transport(wire)
    peer = 1 - rank()
    value = torch.view_as_complex(torch.arange(12.0).reshape(2, 3, 2))
    lazy = [value.conj(), value.conj().imag, value.conj().T]
    assert lazy[0].is_conj()
    assert lazy[1].is_neg()
    transport.begin(
        [
            Expected(peer, Message("F", 0, i), None, view.dtype)
            for i, view in enumerate(lazy)
        ],
        3,
    )
    for i, view in enumerate(lazy):
        transport.isend(view, peer, Message("F", 0, i))
    for i, view in enumerate(lazy):
        expected = view.clone().resolve_conj().resolve_neg()
        assert torch.equal(transport.recv(peer, Message("F", 0, i), LONG_S), expected)
    transport.flush(LONG_S)
    transport.close()


def test_views_that_only_note_their_sign_arrive_with_it() -> None:
    run_ranks(2, on_each_wire, _lazy_signs)
