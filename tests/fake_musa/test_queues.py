"""The device that runs behind the host lets faults show: each of these would go wrong on a GPU."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.fake_musa.queued import queued
from tests.ranks import RankRun, run_ranks, start_ranks

pytestmark = pytest.mark.usefixtures("emulated_musa")

_SIZE = 1000


def _alone(function, **options):
    (found,) = run_ranks(1, function, device="musa", env=queued(**options))
    return found


# -- streams ---------------------------------------------------------------------------------------


def _a_side_stream_reads():
    """Read what the current stream computes, without and with a wait for it."""
    side, found = torch.musa.Stream(), []
    (torch.ones(_SIZE, device="musa") * 2).cpu()  # first launches are slow
    for waits in (False, True):
        ones = torch.ones(_SIZE, device="musa")
        if waits:
            side.wait_stream(torch.musa.current_stream())
        with torch.musa.stream(side):
            twice = ones * 2
        side.synchronize()
        found.append(twice.cpu().unique().tolist())
        torch.musa.synchronize()
    return found


def test_who_does_not_wait_for_a_stream_reads_poison() -> None:
    without, with_it = _alone(_a_side_stream_reads, kernel_us=50_000)
    assert without != [2.0]
    assert with_it == [2.0]


def test_one_hardware_queue_hides_a_missing_wait() -> None:
    """Streams that share a queue run in the order of their submission, by luck."""
    assert _alone(_a_side_stream_reads, connections=1, kernel_us=50_000) == [
        [2.0],
        [2.0],
    ]


def _overwritten():
    """Write to what a side stream reads late, without and with a wait."""
    side, found = torch.musa.Stream(), []
    host = torch.empty(_SIZE, pin_memory=True)
    for waits in (False, True):
        ones = torch.ones(_SIZE, device="musa")
        torch.musa.synchronize()
        with torch.musa.stream(side):
            host.copy_(ones, non_blocking=True)
        if waits:
            torch.musa.current_stream().wait_stream(side)
        ones.fill_(5)
        torch.musa.synchronize()
        found.append(host.unique().tolist())
    return found


def test_what_is_overwritten_too_early_shows() -> None:
    assert _alone(_overwritten, copy_us=100_000) == [[5.0], [1.0]]


def _run_ahead():
    event = torch.musa.Event()
    tensor = torch.ones(_SIZE, device="musa")
    for _ in range(20):
        tensor = tensor + 1
    event.record()
    before = event.query()
    event.synchronize()
    return before, event.query(), tensor.unique().tolist()


def test_the_host_runs_ahead() -> None:
    assert _alone(_run_ahead, kernel_us=20_000) == (False, True, [21.0])


def _timed():
    begin, end = (torch.musa.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(1, device="musa").add_(1)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_events_tell_the_time_of_the_device() -> None:
    assert _alone(_timed, kernel_us=30_000) >= 60


def _time_spent():
    begin, end = (torch.musa.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.ops.fake_musa.spend(0, 40_000)
    end.record()
    at_once = end.query()
    end.synchronize()
    return at_once, begin.elapsed_time(end)


def test_a_kernel_can_take_time_and_compute_nothing() -> None:
    at_once, lasted_ms = _alone(_time_spent)
    assert not at_once
    assert lasted_ms >= 40


# -- memory ----------------------------------------------------------------------------------------


def _used_by_a_side_stream():
    """Free what a side stream still has to read, without and with `record_stream`."""
    side, found = torch.musa.Stream(), []
    host = torch.empty(_SIZE, pin_memory=True)
    for is_told in (False, True):
        ones = torch.ones(_SIZE, device="musa")
        side.wait_stream(torch.musa.current_stream())
        with torch.musa.stream(side):
            host.copy_(ones, non_blocking=True)
        if is_told:
            ones.record_stream(side)
        place = ones.data_ptr()
        del ones
        again = torch.zeros(_SIZE, device="musa")
        reused = again.data_ptr() == place
        torch.musa.synchronize()
        found.append((reused, host.unique().tolist() == [1.0]))
    return found


def test_freed_memory_is_used_again_at_once_unless_a_stream_is_known() -> None:
    found = _alone(_used_by_a_side_stream, copy_us=100_000)
    assert found == [(True, False), (False, True)]


def _freed_in_order():
    """Free memory that the own stream has yet to read."""
    tensor = torch.ones(_SIZE, device="musa")
    total = tensor.sum()
    place = tensor.data_ptr()
    del tensor
    again = torch.full((_SIZE,), 7.0, device="musa")
    return again.data_ptr() == place, total.item(), again.unique().tolist()


def test_the_own_stream_needs_no_care() -> None:
    assert _alone(_freed_in_order, kernel_us=5_000) == (True, float(_SIZE), [7.0])


def _freed_on_a_side_stream():
    """Free what a side stream has yet to read; take memory after a wait for it, and before."""
    side, found = torch.musa.Stream(), []
    for waits in (True, False):
        ones = torch.ones(_SIZE, device="musa")
        host = torch.empty(_SIZE, pin_memory=True)
        torch.musa.synchronize()
        with torch.musa.stream(side):
            host.copy_(ones, non_blocking=True)
            del ones
        if waits:
            torch.musa.current_stream().wait_stream(side)
        torch.empty(1, device="musa")
        torch.musa.synchronize()
        found.append(host.unique().tolist())
    return found


def test_freed_memory_is_another_tensors_when_its_stream_takes_memory_again() -> None:
    """Megatron wraps models so: their weights move on a stream that the default one waits for."""
    with_it, without = _alone(_freed_on_a_side_stream, copy_us=100_000)
    assert with_it == [1.0]
    assert without != [1.0]


def _pinned_memory_freed():
    stays = torch.ones(_SIZE, pin_memory=True)
    on_device = stays.to("musa", non_blocking=True)
    del stays  # torch's own allocator keeps it for the copy
    return on_device.unique().tolist()


def test_pinned_memory_is_kept_for_a_copy() -> None:
    assert _alone(_pinned_memory_freed, copy_us=50_000) == [1.0]


def _unpinned_memory_overwritten():
    source = torch.ones(_SIZE)
    on_device = source.to("musa", non_blocking=True)
    source.fill_(2)
    return on_device.unique().tolist()


def test_a_driver_takes_what_is_not_pinned_at_once() -> None:
    assert _alone(_unpinned_memory_overwritten, copy_us=50_000) == [1.0]


# -- the host --------------------------------------------------------------------------------------


def _waits():
    from torch_musa import host_waits

    tensor = torch.ones(3, device="musa")
    host_waits.reset()
    tensor = tensor * 2 + tensor.sum()
    launched = host_waits.by_line()
    tensor[0].item()
    tensor.cpu()
    torch.empty(3).copy_(tensor, non_blocking=True)  # to memory that is not pinned
    torch.zeros(1).to("musa")
    torch.nonzero(tensor)
    torch.musa.current_stream().synchronize()
    return launched, host_waits.by_line()


def test_what_makes_the_host_wait_is_counted_by_line() -> None:
    launched, waits = _alone(_waits, kernel_us=10)
    assert launched == {}
    assert [what for what, _, _ in waits] == [
        "item", "copy to the host", "copy to the host", "blocking copy to the device",
        "aten::nonzero", "synchronize an event",
    ]  # fmt: skip
    lines = [line for _, line, _ in waits]
    assert len(set(lines)) == 6
    assert all(__file__ in line and line.endswith(" _waits") for line in lines)
    assert set(waits.values()) == {1}


# -- communicators ---------------------------------------------------------------------------------


def _join() -> tuple[int, torch.device]:
    rank = int(os.environ["RANK"])
    torch.musa.set_device(rank)
    dist.init_process_group("mccl")
    return rank, torch.device("musa", rank)


def _stops(num_ranks: int, function, *args, **options) -> RankRun:
    env = queued(stuck_s=2, **options)
    run = start_ranks(num_ranks, function, *args, device="musa", env=env, timeout_s=60)
    assert not run.timed_out, run.describe()
    assert any(run.exit_codes)
    return run


def _first_use(group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    tensor = torch.zeros(1, device=device)
    (dist.recv if rank else dist.send)(tensor, 1 - rank, group)


def _receives_ahead(num_ahead: int) -> list[float]:
    """Rank 0 needs gradients of rank 1, which needs activations of rank 0, as in 1F1B."""
    rank, device = _join()
    work = torch.ones(4, device=device)
    groups = {kind: dist.new_group([0, 1]) for kind in "FB"}
    for group in groups.values():
        _first_use(group, rank, device)
    received: list[torch.Tensor] = []
    if rank == 0:
        pending = []
        for step in range(4):
            while len(pending) < min(4, step + num_ahead):
                gradient = torch.empty(4, device=device)
                pending.append((dist.irecv(gradient, 1, groups["B"]), gradient))
            dist.isend(work * step, 1, groups["F"])
            if step >= 1 or num_ahead == 1:
                request, gradient = pending[len(received)]
                request.wait()
                received.append(gradient * 10)
    else:
        for _ in range(4):
            activation = torch.empty(4, device=device)
            dist.irecv(activation, 0, groups["F"]).wait()
            gradient = activation + 1
            dist.isend(gradient, 0, groups["B"])
            received.append(gradient)
    torch.musa.synchronize()
    return [tensor[0].item() for tensor in received]


def test_two_receives_ahead_stop_where_there_is_one_queue() -> None:
    run = _stops(2, _receives_ahead, 2, connections=1)
    text = run.logs[0]
    assert "nothing can move any more" in text
    assert "queue 0: recv from 1" in text
    assert "queue 0: recv from 0" in text


def test_eight_queues_let_them_pass() -> None:
    first, second = run_ranks(
        2, _receives_ahead, 2, device="musa", env=queued(connections=8)
    )
    assert second == [1.0, 2.0, 3.0, 4.0]
    assert first == [10.0, 20.0, 30.0]


def _swap(together: bool) -> list[float]:
    rank, device = _join()
    peer = 1 - rank
    mine, theirs = (
        torch.full((3,), 1.0 + rank, device=device),
        torch.empty(3, device=device),
    )
    if together:
        send, receive = (
            dist.P2POp(dist.isend, mine, peer),
            dist.P2POp(dist.irecv, theirs, peer),
        )
        works = dist.batch_isend_irecv([send, receive])
    else:
        works = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
    for work in works:
        work.wait()
    return theirs.tolist()


@pytest.mark.parametrize("connections", [1, 8])
def test_only_grouped_operations_progress_together(connections: int) -> None:
    env = queued(connections=connections)
    assert run_ranks(2, _swap, True, device="musa", env=env) == [[2.0] * 3, [1.0] * 3]
    text = _stops(2, _swap, False, connections=connections).logs[0]
    assert text.count("send to") >= 2


def _nobody_comes() -> None:
    """Each rank first sends to the next one, and so makes a communicator with it."""
    rank, device = _join()
    dist.isend(torch.ones(1, device=device), (rank + 1) % 3)


def test_the_first_use_of_a_communicator_waits_for_its_peer() -> None:
    text = _stops(3, _nobody_comes).logs[0]
    assert text.count("waits for the other ranks of communicator") >= 3


def _two_kinds_of_wait() -> tuple[dict, dict]:
    from torch_musa import host_waits

    _, device = _join()
    tensor = torch.ones(2, device=device)
    host_waits.reset()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
    works[0].wait()
    stream_waits = host_waits.by_line()
    works[1].wait(timedelta(seconds=20))
    return stream_waits, host_waits.by_line()


def test_a_wait_with_a_time_out_blocks_the_host() -> None:
    for without, with_it in run_ranks(
        2, _two_kinds_of_wait, device="musa", env=queued()
    ):
        assert without == {}
        ((what, _, _),) = with_it
        assert what == "wait for a communicator"


def _tags_mean_nothing() -> list[float]:
    rank, device = _join()
    tensors = [torch.full((1,), float(n), device=device) for n in range(2)]
    for n, tensor in enumerate(tensors):
        if rank == 0:
            dist.send(tensor, 1, tag=n)
        else:
            dist.recv(tensor, 0, tag=1 - n)
    return [tensor.item() for tensor in tensors]


def test_messages_match_by_their_order() -> None:
    assert run_ranks(2, _tags_mean_nothing, device="musa", env=queued())[1] == [
        0.0,
        1.0,
    ]


def _sent_and_dropped() -> list[float]:
    rank, device = _join()
    ends = []
    for n in range(5):
        tensor = torch.full((_SIZE,), float(n), device=device)
        if rank == 0:
            dist.isend(tensor, 1)
            tensor.data = torch.empty(1, device=device)
        else:
            dist.irecv(tensor, 0).wait()
            ends.append(tensor.mean())
    torch.musa.synchronize()
    return [end.item() for end in ends]


def test_what_was_sent_may_be_dropped() -> None:
    env = queued(message_us=20_000)
    assert run_ranks(2, _sent_and_dropped, device="musa", env=env)[1] == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    ]


def _a_peer_dies() -> None:
    rank, device = _join()
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    tensor.item()
    if rank == 1:
        time.sleep(0.5)
        os._exit(3)
    dist.all_reduce(tensor)
    tensor.item()


def test_a_peer_that_is_gone_does_not_leave_others_waiting() -> None:
    run = _stops(2, _a_peer_dies)
    assert run.exit_codes[0] != 0


def _fails_late() -> str:
    table = torch.ones(3, 2, device="musa")
    picked = torch.nn.functional.embedding(torch.tensor([5], device="musa"), table)
    try:
        picked.sum().item()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_error_of_a_kernel_is_told_where_the_host_waits() -> None:
    assert "MUSA error: aten::index_select: index out of range" in _alone(_fails_late)
