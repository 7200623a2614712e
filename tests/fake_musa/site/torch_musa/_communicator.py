"""Communicators of a device that runs behind the host.

They emulate NCCL: the operations of a communicator run one after the other in a separate stream,
and each occupies the device until the other ranks have reached theirs. Nothing is matched by name.
The bytes go through gloo, in one thread per communicator, once the device has reached the
operation.
"""

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import torch_musa

_joined = False
_given_up = False


@dataclass(frozen=True)
class Operation:
    """One operation of a communicator."""

    name: str
    start: Callable
    """Starts the operation on the bytes; returns gloo's works."""
    tensors: list
    """Tensors that the operation reads and writes."""
    finish: Callable | None = None
    meet: Callable | None = None
    """Tells the other rank when this one reached the operation; returns works and their stamp."""


class Communicator:
    """A group of ranks that have connected, with a stream for their operations.

    The constructor waits for all ranks, as `ncclCommInitRank` does.
    """

    def __init__(self, name, store, rank, ranks, key, timeout):
        self._name = name
        self._count = 0
        self._stream = torch_musa.Stream()
        self._jobs = queue.SimpleQueue()
        if len(ranks) > 1:
            keys = {number: f"communicator/{key}/{number}" for number in ranks}
            store.set(keys[rank], "here")
            with host_waits_for(f"the other ranks of communicator {name}"):
                store.wait(list(keys.values()), timeout)
        threading.Thread(target=self._work, name=f"mccl {name}", daemon=True).start()

    def submit(self, operations):
        """Have the device run operations together, after the earlier work in its stream."""
        self._count += 1
        current = torch_musa.current_stream()
        self._stream.wait_stream(current)
        name = (
            " and ".join(operation.name for operation in operations)
            + f" (no. {self._count})"
        )
        place = self._stream.device_index, self._stream.stream_id
        number = torch.ops.fake_musa.message_new(*place, name)
        for operation in operations:
            for tensor in operation.tensors:
                tensor.record_stream(self._stream)
        event = self._stream.record_event()
        parts = [(item.start, item.finish, item.meet) for item in operations]
        self._jobs.put((number, parts))
        return QueuedWork(event, name)

    def _work(self):
        while True:
            number, operations = self._jobs.get()
            turn_s = torch.ops.fake_musa.message_await_turn(number)
            end_s, error = turn_s, ""
            try:
                if not _given_up:
                    end_s = _carry_out(operations, turn_s)
            except Exception as raised:  # the device reports any error
                error = f"{type(raised).__name__}: {raised}"
            torch.ops.fake_musa.message_end(number, end_s, error)
            del operations


def _carry_out(operations, turn_s):
    """Start all, then wait for all; return when all ranks had arrived, by their devices' clocks."""
    works = [work for start, _, _ in operations for work in start()]
    meetings = [meet(turn_s) for _, _, meet in operations if meet is not None]
    for work in works + [work for their_works, _ in meetings for work in their_works]:
        work.wait()
    for _, finish, _ in operations:
        if finish is not None:
            finish()
    if len(meetings) < len(operations):
        return (
            time.monotonic()
        )  # a collective, whose other ranks do not report their times
    return max(turn_s, *(stamp.item() for _, stamp in meetings))


class QueuedWork(dist.Work):
    """An operation queued on the device."""

    def __init__(self, event, name):
        super().__init__()
        self._event = event
        self._name = name

    def wait(self, timeout=None):
        """Make the current stream wait; with a time-out the host also polls, as with NCCL."""
        torch_musa.current_stream().wait_event(self._event)
        if timeout is not None and timeout.total_seconds() > 0:
            self.block_host(timeout.total_seconds())
        return True

    def block_host(self, timeout_s=None):
        """Make the host wait."""
        if not self._event._point.synchronize("wait for a communicator", timeout_s):
            raise RuntimeError(f"MCCL: {self._name} timed out after {timeout_s:g} s")

    def is_completed(self):
        return self._event.query()

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(None)
        return future


@contextlib.contextmanager
def host_waits_for(event):
    """Let standstill reports say what the host is waiting for."""
    if not torch.ops.fake_musa.is_async():
        yield
        return
    torch.ops.fake_musa.host_state(f"waits for {event}")
    try:
        yield
    finally:
        torch.ops.fake_musa.host_state("")


def join_board(store, rank, size):
    """Let the ranks of the first group see each other's progress."""
    global _joined
    if _joined:
        return
    _joined = True
    atexit.register(_give_up)
    if rank == 0:
        file = torch.ops.fake_musa.board_new()
        store.set("board", f"{os.getpid()}/fd/{file}")
    else:
        file = os.open(f"/proc/{store.get('board').decode()}", os.O_RDWR)
    torch.ops.fake_musa.board_join(file, rank)


def _give_up():
    """Stop computing while the process exits with the device's threads still running."""
    global _given_up
    _given_up = True
    torch.ops.fake_musa.give_up("the process ends")


def forget():
    """Drop the device's state, because a forked process gets a separate device."""
    global _joined
    _joined = False
