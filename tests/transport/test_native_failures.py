"""The transport of the native core when ranks are silent, die, give up or leave."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_ext.errors import (
    PeerAborted,
    PeerClosed,
    PeerDied,
    TransportError,
    TransportTimeout,
    reason_for_peers,
)
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.rendezvous import connect_peers
from tests.ranks import run_ranks, start_ranks
from tests.transport.native_ranks import (
    SLOT_BYTES,
    WIRES,
    exchange,
    on_each_wire,
    open_transport,
    rank,
    store,
)

if TYPE_CHECKING:
    from megatron_ext.transport.address import Wire
    from megatron_ext.transport.native_transport import NativeTransport

pytestmark = pytest.mark.usefixtures("native")


def _silent_peer(wire: Wire) -> list[str]:
    transport = open_transport(wire)
    messages = []
    done = Path(f"{wire} done")
    transport.begin([Expected(0, Message("F", 3, 7), None, torch.float32)] * rank(), 1)
    if rank() == 1:
        with pytest.raises(TransportTimeout) as raised:
            transport.recv(0, Message("F", 3, 7), 0.2)
        messages.append(str(raised.value))
        for i in range(20):
            transport.isend(
                torch.ones(SLOT_BYTES if wire == "shm" else 1 << 20),
                0,
                Message("B", 2, i),
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
    told = run_ranks(2, on_each_wire, _silent_peer)[1]
    for wire, (received, flushed) in zip(WIRES, told, strict=True):
        assert re.search(
            r"activation that stage 3 needs for micro-batch 7 did not come from rank 0: .*0\.2 s; "
            rf"rank 0 on host {host} \(wire {wire}\) is open: 0 messages .* 0 of 8 slots",
            received,
        )
        assert "rank 0 did not receive the messages sent to it" in flushed
        assert re.search(r"[1-9]\d* messages queued for it", flushed)
    assert (
        "18 messages queued for it" in told[0][1]
    )  # 8 slots took two messages of 4 pieces


def _wait_for_ever(transport: NativeTransport, waiting: str) -> None:
    """Longer than a run may last, so nothing but an error ends it."""
    if waiting == "recv":
        transport.recv(1, Message("F", 0, 0), 1000)
    while waiting == "poll":
        transport.poll(1000)
    while waiting == "isend":
        transport.isend(torch.ones(2 * SLOT_BYTES), 1, Message("F", 1, 0))
        transport.flush(1000)


def _killed(wire: Wire, waiting: str) -> str:
    transport = open_transport(wire)
    transport.begin(
        [Expected(1, Message("F", 0, 0), None, torch.float32)] * (rank() == 0), 1
    )
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 2:
        transport.close()
        return ""
    with pytest.raises(PeerDied) as raised:
        _wait_for_ever(transport, waiting)
    transport.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("wire", "waiting"),
    [
        ("shm", "recv"),
        ("shm", "poll"),
        ("shm", "isend"),
        ("tcp", "recv"),
        ("tcp", "isend"),
    ],
)
def test_a_killed_peer_is_named(wire, waiting) -> None:
    run = start_ranks(3, _killed, wire, waiting)
    assert run.exit_codes == [0, -signal.SIGKILL, 0], run.describe()
    assert f"rank 1 on host {socket.gethostname()} (wire {wire}) died" in run.values[0]
    if waiting == "recv":
        assert run.values[0].startswith(
            "the activation that stage 0 needs for micro-batch 0"
        )


def _killed_parent_of_workers(wire: Wire) -> None:
    """Data loader workers outlive their parent for a while."""
    transport = open_transport(wire)
    transport.begin(
        [Expected(1, Message("F", 0, 0), None, torch.float32)] * (rank() == 0), 1
    )
    if rank() == 1:
        if os.fork() == 0:
            with pytest.raises(
                TransportError, match="cannot be used by its forked child"
            ):
                transport.isend(torch.ones(1), 0, Message("F", 0, 0))
            Path("worker").touch()
            signal.pause()
        while not Path("worker").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDied, match=rf"rank 1 on host .* \(wire {wire}\) died"):
        transport.recv(1, Message("F", 0, 0), 1000)


@pytest.mark.parametrize("wire", WIRES)
def test_a_killed_peer_is_noticed_though_its_workers_live(wire) -> None:
    run = start_ranks(2, _killed_parent_of_workers, wire)
    assert run.exit_codes == [0, -signal.SIGKILL], run.describe()


def _aborting(wire: Wire) -> str:
    transport = open_transport(wire)
    key = Message("F", 0, 0)
    transport.begin([Expected(1, key, None, torch.float32)], 1)
    if rank() == 1:
        transport.abort("ran out of memory at /tmp/\udcff")
        with pytest.raises(TransportError, match="aborted: ran out of memory"):
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
    for message in run_ranks(2, on_each_wire, _aborting)[0]:
        assert "did not come from rank 1" in message
        assert "gave up: rank 1: ran out of memory at /tmp/?" in message


def _passing_on(wire: Wire) -> str:
    """Each rank waits for the next one; the last gives up for an error with a long text."""
    transport = open_transport(wire)
    key, me = Message("F", 0, 0), rank()
    last = int(os.environ["WORLD_SIZE"]) - 1
    transport.begin(
        [Expected(me + 1, key, None, torch.float32)] if me < last else [], 1
    )
    try:
        if me == last:
            raise ValueError(f"no weights {'x' * 1000}")
        transport.recv(me + 1, key, 1000)
    except (ValueError, TransportError) as error:
        told = str(error)
        transport.abort(reason_for_peers(error))
    transport.close()
    return told


def test_a_reason_stays_as_long_as_it_was_however_many_ranks_pass_it_on() -> None:
    for messages in zip(*run_ranks(4, on_each_wire, _passing_on), strict=True):
        for message in messages[:-1]:
            assert message.endswith(
                "gave up: rank 3: ValueError: no weights " + "x" * 1000
            )
            assert message.count("gave up") == 1


def _aborted_by_another_thread(wire: Wire, waiting: str) -> None:
    """As by a thread whose copy has failed; the peer computes and hears of nothing."""
    transport = open_transport(wire)
    done = Path(f"{wire} done")
    transport.begin(
        [Expected(1, Message("F", 0, 0), None, torch.float32)] * (rank() == 0), 1
    )
    if rank() == 0:
        for i in range(20 * (waiting == "flush")):
            transport.isend(torch.ones(1 << 18), 1, Message("F", 1, i))
        threading.Timer(0.2, transport.abort, ["a copy failed"]).start()
        with pytest.raises(
            TransportError, match=r"^the transport was aborted: a copy failed; "
        ):
            transport.flush(1000) if waiting == "flush" else _wait_for_ever(
                transport, waiting
            )
        done.touch()
    while not done.exists():
        time.sleep(0.02)
    transport.close()


@pytest.mark.parametrize("waiting", ["recv", "poll", "flush"])
def test_another_thread_that_gives_up_ends_the_wait_of_its_own_rank(waiting) -> None:
    run_ranks(2, on_each_wire, _aborted_by_another_thread, waiting, timeout_s=30)


def _interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    transport = open_transport("shm")
    transport.begin([Expected(0, Message("F", 0, 0), None, torch.float32)], 1)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        transport.recv(0, Message("F", 0, 0), 1000)
    transport.close()


def test_ctrl_c_ends_a_wait() -> None:
    run_ranks(1, _interrupted, timeout_s=30)


def _without_memory(wire: Wire) -> str:
    if rank() == 1:  # as if there were no memory for its arena
        for peer in connect_peers(
            store(), 1, [0], run_id=f"test/{wire}", timeout_s=9, wire=wire
        ).values():
            peer.socket.close()
        return ""
    with pytest.raises(TransportError) as raised:
        open_transport(wire)
    return str(raised.value)


def test_a_peer_that_has_no_memory_is_named() -> None:
    message = run_ranks(2, _without_memory, "shm")[0]
    assert message.startswith(
        f"rank 0 has no link to rank 1 on host {socket.gethostname()}: "
    )


def _farewell(wire: Wire) -> None:
    transport = open_transport(wire)
    keys = [Message("F", 0, i) for i in range(2)]
    if rank() == 1:
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
    run_ranks(2, on_each_wire, _farewell)


def _leaves_early(wire: Wire) -> None:
    """As by an error outside of the step, behind which the process ends."""
    transport = open_transport(wire)
    done = Path(f"{wire} done")
    keys = [Message("F", 0, i) for i in range(3)]
    if rank() == 1:
        transport.begin([], 1)
        transport.isend(torch.ones(5), 0, keys[0])
    elif rank() == 0:
        transport.begin([Expected(1, key, None, torch.float32) for key in keys[:2]], 2)
        transport.expect([Expected(2, keys[2], None, torch.float32)])
        assert transport.poll(1000) == keys[:1]
        with pytest.raises(
            PeerClosed, match=rf"rank 1 on host .* \(wire {wire}\) closed its"
        ):
            transport.poll(1000)
        transport.recv(1, keys[0], 0)
        done.touch()
    while rank() == 2 and not done.exists():
        time.sleep(0.02)
    transport.close()


def test_a_poll_ends_when_one_peer_of_several_has_left_early() -> None:
    run_ranks(3, on_each_wire, _leaves_early, timeout_s=60)


def _descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def _leaves_nothing(wire: Wire) -> None:
    open_transport(
        wire, "first"
    ).close()  # /dev/null is opened once, for forked children
    before = _descriptors()
    for turn in range(3):
        transport = open_transport(
            wire, f"turn {turn % 2}"
        )  # also under a former run id
        exchange(transport, 10, turn)
        transport.close()
        assert _descriptors() == before
    assert "memfd:megatron_ext" not in Path("/proc/self/maps").read_text()


def test_nothing_is_left_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    run_ranks(3, on_each_wire, _leaves_nothing)
    run = start_ranks(3, _killed, "auto", "recv")
    assert run.exit_codes == [0, -signal.SIGKILL, 0], run.describe()
    new = {path.name for path in Path("/dev/shm").iterdir()} - {
        path.name for path in before
    }
    assert [name for name in new if "megatron_ext" in name or "mext" in name] == []
