"""Hangs that users of other programs reported, reduced to the order of their operations.

Each order runs on emulated devices whose communicators behave as NCCL's (`tests/fake_musa`), and
stops where the report says; beside it stands an order of the same operations that ends. Where the
report names a function of Megatron's, that function runs, too. `docs/hangs.md` tells each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from tests.fake_musa.queued import queued
from tests.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.usefixtures("emulated_musa")

Program = Sequence[str]
"""Of one rank: `>1` sends to rank 1, `<1` receives from it; with several in one word they are
begun together, as by `batch_isend_irecv`."""

_FIXED_ORDER = (">1 <1", ">0 <0 >2 <2", ">1 <1 >3 <3", ">2 <2")
"""Each rank of four: to and from the rank before, then the one after."""

_CYCLE = ("<3 >1", "<0 >2", "<1 >3", "<2 >0")
"""A ring in which all wait for the rank before: interleaved stages wrap around."""

_STOPS: dict[str, tuple[tuple[Program, ...], tuple[Program, ...]]] = {
    "pytorch#172668, both ranks send first": (
        ([">1", "<1"], [">0", "<0"]),
        ([">1", "<1"], ["<0", ">0"]),
    ),
    "pytorch#172668, after a swap of sends and receives": (
        ([">1", ">1", "<1"], ["<0", ">0", "<0"]),
        ([">1", "<1", ">1"], ["<0", ">0", "<0"]),
    ),
    "Megatron-LM#5100, shapes in a fixed order and one by one": (
        tuple(row.split() for row in _FIXED_ORDER),
        tuple([row.replace(" ", "")] for row in _FIXED_ORDER),
    ),
    "Megatron-LM PR 5240, communicators made in another order by each rank": (
        tuple(row.split() for row in _CYCLE),
        (["<3", ">1"], [">2", "<0"], ["<1", ">3"], [">0", "<2"]),
    ),
}
"""Orders that stop, and orders of the same operations that end."""


def _run(programs: Sequence[Program]) -> list[float]:
    """Do what the program of this rank says; return what came, in its order."""
    rank = int(os.environ["RANK"])
    torch.musa.set_device(rank)
    dist.init_process_group("mccl")
    device = torch.device("musa", rank)
    dist.all_reduce(
        torch.zeros(1, device=device)
    )  # of all ranks: there before anything else
    received = []
    for step in programs[rank]:
        operations = []
        for word in step.replace("<", " <").replace(">", " >").split():
            tensor = torch.full((4,), float(rank), device=device)
            if word[0] == "<":
                received.append(tensor)
            act = dist.irecv if word[0] == "<" else dist.isend
            operations.append(dist.P2POp(act, tensor, int(word[1:])))
        if len(operations) > 1:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        else:
            (one,) = operations
            one.op(one.tensor, one.peer).wait()
    return [tensor[0].item() for tensor in received]


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("name", _STOPS)
def test_the_published_order_stops(name: str, connections: int) -> None:
    programs, _ = _STOPS[name]
    env = queued(connections=connections, stuck_s=2)
    run = start_ranks(
        len(programs), _run, programs, device="musa", env=env, timeout_s=60
    )
    assert any(run.exit_codes)
    assert not run.timed_out
    text = max(run.logs, key=len)
    assert "nothing can move any more" in text
    assert "PR 5240" not in name or "waits for the other ranks of communicator" in text


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("name", _STOPS)
def test_another_order_of_the_same_ends(name: str, connections: int) -> None:
    _, programs = _STOPS[name]
    env = queued(connections=connections)
    found = run_ranks(len(programs), _run, programs, device="musa", env=env)
    for came, program in zip(found, programs, strict=True):
        words = "".join(program).replace("<", " <").replace(">", " >").split()
        assert came == [float(word[1:]) for word in words if word[0] == "<"]


def _join() -> tuple[int, torch.device]:
    rank = int(os.environ["RANK"])
    torch.musa.set_device(rank)
    dist.init_process_group("mccl")
    device = torch.device("musa", rank)
    dist.all_reduce(torch.zeros(1, device=device))
    return rank, device


def _both_ways_at_once(exchange: str) -> tuple[float, float]:
    """Exchange with the rank before and the one after, which are the same, by Megatron's function.

    Returns:
        What came from the rank before and from the one after.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    rank, device = _join()
    to_previous, to_next = (
        torch.full((2,), value, device=device) for value in (1.0, 2.0)
    )
    from_previous, from_next = (torch.empty(2, device=device) for _ in range(2))
    works = getattr(p2p_communication, exchange)(
        tensor_send_prev=to_previous,
        tensor_recv_prev=from_previous,
        tensor_send_next=to_next,
        tensor_recv_next=from_next,
        group=dist.new_group([0, 1]),
        prev_pipeline_rank=1 - rank,
        next_pipeline_rank=1 - rank,
    )
    for work in works.values() if isinstance(works, dict) else works:
        work.wait()
    return from_previous[0].item(), from_next[0].item()


@pytest.mark.parametrize(
    ("exchange", "came"), [("_batched_p2p_ops", (1.0, 2.0)), ("_p2p_ops", (2.0, 1.0))]
)
def test_megatron_1450_crosses_what_goes_to_one_peer(
    exchange: str, came: tuple[float, float]
) -> None:
    """Outputs of the rank before are 2, gradients of the one after are 1.

    Unbatched, Megatron takes another communicator for each direction.
    """
    found = run_ranks(2, _both_ways_at_once, exchange, device="musa", env=queued())
    assert found == [came] * 2


def _exchange_shapes(one_by_one: bool) -> tuple[list[int], list[int]]:
    """Exchange shapes with both neighbours of four, by Megatron's own function."""
    from megatron.core import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    rank, device = _join()
    if one_by_one:
        dist.batch_isend_irecv = start_one_by_one  # this process is a rank and ends
    config = ModelParallelConfig(
        pipeline_model_parallel_size=4,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
    )
    assert dist.group.WORLD is not None
    communicator = P2PCommunicator(dist.group.WORLD, config)
    activation = torch.empty(1 + rank, 2, 3, device=device) if rank < 3 else None
    gradient = torch.empty(10 + rank, 2, 3, device=device) if rank > 0 else None
    found: tuple[list[int], list[int]] = communicator._communicate_shapes(
        activation, gradient, rank > 0, rank < 3
    )
    return found


def start_one_by_one(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Do what `batch_isend_irecv` begins together one after the other."""
    for one in operations:
        work = one.op(one.tensor, one.peer, one.group)
        assert work is not None
        work.wait()
    return []


@pytest.mark.parametrize("connections", [1, 8])
def test_megatron_5100_ends_if_the_four_are_started_together(connections: int) -> None:
    env = queued(connections=connections)
    found = run_ranks(4, _exchange_shapes, False, device="musa", env=env)
    for rank, (from_previous, from_next) in enumerate(found):
        assert from_previous == ([rank, 2, 3] if rank > 0 else [0, 0, 0])
        assert from_next == ([11 + rank, 2, 3] if rank < 3 else [0, 0, 0])


@pytest.mark.parametrize("connections", [1, 8])
def test_megatron_5100_stops_if_they_are_started_one_by_one(connections: int) -> None:
    env = queued(connections=connections, stuck_s=2)
    run = start_ranks(4, _exchange_shapes, True, device="musa", env=env, timeout_s=60)
    assert any(run.exit_codes)
    assert not run.timed_out
    assert "nothing can move any more" in max(run.logs, key=len)
