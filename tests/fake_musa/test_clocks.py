"""With `lag_us` queues keep the device's time: late threads do not count, a late host does."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.fake_musa.queued import queued
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("emulated_musa")


def _on_one_rank(function, **options):
    (found,) = run_ranks(1, function, device="musa", env=queued(**options))
    return found


def _late_threads() -> float:
    """Spend 20 ms in 20 kernels, with others between them that take no time of the device."""
    begin, end = (torch.musa.Event(enable_timing=True) for _ in range(2))
    table, flag = torch.ones(200, 200, device="musa"), torch.zeros(1, dtype=torch.int32)
    torch.ops.fake_musa.spin(0, flag)  # so that the host is ahead
    begin.record()
    for _ in range(20):
        torch.ops.fake_musa.spend(0, 1000)
        table = table @ table / 200
    end.record()
    flag.fill_(1)
    end.synchronize()
    return begin.elapsed_time(end)


def test_a_late_thread_need_not_make_the_device_late() -> None:
    assert _on_one_rank(_late_threads) > 20
    assert _on_one_rank(_late_threads, lag_us=1e6) == pytest.approx(20, abs=1e-4)


def _late_host() -> float:
    """Spend 1 ms twice, 50 ms apart."""
    begin, end = (torch.musa.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.ops.fake_musa.spend(0, 1000)
    time.sleep(0.05)
    torch.ops.fake_musa.spend(0, 1000)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_what_the_host_launches_late_runs_late() -> None:
    assert _on_one_rank(_late_host, lag_us=1e6) >= 51


def _told_late(by_event: bool) -> float:
    """Return when rank 0 has spent 50 ms, or when rank 1 hears of it, by their devices' clocks."""
    rank = int(os.environ["RANK"])
    torch.musa.set_device(rank)
    dist.init_process_group("mccl")
    store = dist.distributed_c10d._get_default_store()
    end, flag = torch.musa.Event(enable_timing=True), torch.zeros(1, dtype=torch.int32)
    tensor = torch.ones(1, device="musa")
    (dist.recv if rank else dist.send)(
        tensor, 1 - rank
    )  # the first use makes the communicator
    if rank == 0:
        torch.ops.fake_musa.spin(rank, flag)
        torch.ops.fake_musa.spend(rank, 50_000)
        end.record()
        if by_event:
            shared = torch.musa.Event(interprocess=True)
            shared.record()
            store.set("event", shared.ipc_handle())
        else:
            dist.isend(tensor, 1)
        store.wait(["launched"])
        flag.fill_(1)
    else:
        if by_event:
            torch.musa.Event.from_ipc_handle(tensor.device, store.get("event")).wait()
        else:
            dist.irecv(tensor, 0).wait()
        end.record()
        store.set("launched", "")
    end.synchronize()
    dist.barrier()
    return end._point.time_s


@pytest.mark.parametrize(("by_event", "message_s"), [(True, 0), (False, 0.03)])
def test_ranks_share_one_clock(by_event: bool, message_s: float) -> None:
    env = queued(lag_us=1e6, message_us=30_000)
    spent_s, heard_s = run_ranks(2, _told_late, by_event, device="musa", env=env)
    assert heard_s - spent_s == pytest.approx(message_s, abs=1e-6)
