"""Groups of gloo: collectives in NCCL's shapes, one worker each."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megatron_ext import devices
from megatron_ext.devices import cpu
from tests.ranks import run_ranks

_STRESS_S = 20.0


def _options(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options


def one_worker_each() -> None:
    dist.init_process_group("nccl", timeout=timedelta(seconds=77))
    group = dist.new_group(backend="gloo")
    assert _options(dist.group.WORLD)._threads == _options(group)._threads == 1
    assert _options(dist.group.WORLD)._timeout == timedelta(seconds=77)
    assert _options(group)._timeout == timedelta(minutes=30)
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0] * 3


def interfaces_are_those_of_the_environment() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    dist.init_process_group("gloo")
    assert len(_options(dist.group.WORLD)._devices) == 2
    assert _options(dist.group.WORLD)._threads == 1
    dist.barrier()
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    with pytest.raises(RuntimeError, match="nowhere0"):
        dist.new_group(backend="gloo")


def options_of_a_caller_are_kept() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._threads = 3
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    assert group.options._threads == 3
    positional = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert positional.options._timeout == timedelta(seconds=5)
    assert positional.options._threads == 1
    assert dist.ProcessGroupGloo(dist.HashStore(), rank=0, size=1).options._threads == 1


def a_blocked_collective_is_aborted_and_nothing_else() -> None:
    device = devices.current()
    device.follow_collectives()
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    group = dist.new_group(backend="gloo")
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 1:  # lives, and does not take part
        store.wait(["aborted"], timedelta(seconds=30))
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    threading.Timer(0.3, device.abort_collectives).start()
    with pytest.raises(
        RuntimeError, match=r"Connection (closed|reset) by peer|not connected"
    ):
        dist.all_reduce(torch.ones(1), group=group)
    mine.sendall(b"whole")
    assert peer.recv(5) == b"whole"
    store.set("aborted", "1")  # the store's connection is whole too


def messages_and_collectives_may_take_their_time() -> None:
    """Waits look for aborts every 0.2 s, and a message whose wait ends early would be lost."""
    devices.current().follow_collectives()
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    for number in range(3):
        value = torch.full((2,), float(number))
        if rank == 0:
            time.sleep(0.5)
            dist.send(value, 1)
            dist.isend(value + 1, 1).wait()
        else:
            received = torch.empty(2)
            dist.recv(received, 0)
            assert torch.equal(received, value)
            dist.recv(received)  # from any rank
            assert torch.equal(received, value + 1)
            time.sleep(0.5)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [2.0, 2.0]


def _meet_again_and_again() -> None:
    while True:
        dist.barrier()


def every_abort_ends_the_collective() -> float:
    """Abort 60 groups at random moments of their barriers; return the longest wait in seconds."""
    device = devices.current()
    dist.init_process_group("nccl")
    base = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    draw = random.Random(rank)
    longest_s = 0.0
    for number in range(60):
        device.follow_collectives()
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore(f"group {number}", base),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()
        aborted_s: list[float] = []

        def abort(aborted_s: list[float] = aborted_s) -> None:
            aborted_s.append(time.monotonic())
            device.abort_collectives()
            dist.destroy_process_group()  # as NVRx does

        timer = threading.Timer(draw.random() * 0.004, abort)
        timer.start()
        with pytest.raises((RuntimeError, ValueError)):
            _meet_again_and_again()
        timer.join()
        longest_s = max(longest_s, time.monotonic() - aborted_s[0])
    return longest_s


def test_torch_since_2_15_hands_over_what_older_ones_do_not_know() -> None:
    made: list[tuple[Any, ...]] = []
    initialize = cpu._one_worker(lambda *args: made.append(args))
    initialize(
        None, "store", 0, 2, timeout=timedelta(seconds=5), enable_reconfigure=False
    )
    [(_, store, rank, size, options)] = made
    assert (store, rank, size) == ("store", 0, 2)
    assert (options._threads, options._timeout) == (1, timedelta(seconds=5))


def undone() -> None:
    import megatron_ext

    megatron_ext.deactivate()
    dist.init_process_group("gloo")
    assert _options(dist.group.WORLD)._threads == 2


def gathers_that_end_together() -> int:
    """Keep 64 coalesced gathers under way: with two workers of a group a rank soon crashes."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    part = torch.full((4,), float(dist.get_rank()))
    whole = [[torch.zeros(4 * size) for _ in range(2)] for _ in range(64)]
    expected = torch.arange(float(size)).repeat_interleave(4)
    done = torch.tensor([0])
    end = time.monotonic() + _STRESS_S
    rounds = 0
    while not done.item():
        works = []
        for gathered in whole:
            with dist._coalescing_manager(async_ops=True) as work:
                for tensor in gathered:
                    dist.all_gather_into_tensor(tensor.zero_(), part)
            works.append(work)
        for work in works:
            work.wait()
        assert all(
            torch.equal(tensor, expected) for gathered in whole for tensor in gathered
        )
        rounds += 1
        done[0] = time.monotonic() > end
        dist.all_reduce(done, op=dist.ReduceOp.MAX)
    return rounds


def test_messages_and_collectives_may_take_their_time() -> None:
    run_ranks(2, messages_and_collectives_may_take_their_time)


def test_every_abort_ends_the_collective() -> None:
    assert max(run_ranks(2, every_abort_ends_the_collective, timeout_s=120)) < 10


def test_each_group_has_one_worker() -> None:
    run_ranks(2, one_worker_each)


def test_interfaces_are_those_of_the_environment() -> None:
    run_ranks(2, interfaces_are_those_of_the_environment)


def test_options_of_a_caller_are_kept() -> None:
    run_ranks(1, options_of_a_caller_are_kept)


def test_undone() -> None:
    run_ranks(1, undone)


@pytest.mark.slow
def test_coalesced_gathers_that_end_together_do_not_crash() -> None:
    first, second = run_ranks(2, gathers_that_end_together)
    assert first == second > 10


def test_a_blocked_collective_is_aborted_and_nothing_else() -> None:
    run_ranks(2, a_blocked_collective_is_aborted_and_nothing_else)
