"""Messages of emulated devices over their own collectives, which match nothing by name.

This is what a GPU does by default: NCCL as well ignores tags and runs what one communicator is
given one after the other. `tests/test_matrix.py` has the schedules.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext.message import Message
from megatron_ext.transport.base import Expected
from megatron_ext.transport.torch_dist import TorchTransport
from tests.ranks import run_ranks
from tests.runtime.capture import PP2, PP4, train
from tests.runtime.test_equality import UNCLIPPED, assert_equal
from tests.training.helpers import NO_DROPOUT, bert_flags


def _shapes_of_both() -> None:
    """Send shapes that nobody knows before, as a stage in the steady state does."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    links = [(0, 1), (1, 0)]
    device = torch.device("cuda", me)
    transport = TorchTransport(device, links, timeout_s=30, shapes_travel=True)
    keys = [Message("FB"[i % 2], me, i) for i in range(6)]
    # Rank 0 sends all, then takes all; rank 1 the other way round.
    expected = [
        Expected(
            peer, key._replace(stage=peer), None, torch.float32, 0 if me else len(keys)
        )
        for key in keys
    ]
    transport.begin(expected, slots=6)

    def send() -> None:
        for key in keys:
            transport.isend(
                torch.full((key.microbatch, 3), 1.0 + me, device=device), peer, key
            )

    def take() -> None:
        for item in expected[::-1]:  # not the order in which they were sent
            tensor = transport.recv(peer, item.message, 30)
            assert torch.equal(
                tensor.cpu(), torch.full((item.message.microbatch, 3), 1.0 + peer)
            )

    for act in (take, send) if me else (send, take):
        act()
    transport.flush(30)
    transport.close()


@pytest.mark.usefixtures("emulated_musa")
def test_shapes_that_travel() -> None:
    run_ranks(2, _shapes_of_both, device="musa")


@pytest.mark.usefixtures("emulated_musa")
def test_twins_that_read_data_for_each_other(tmp_path: Path) -> None:
    flags = f"{bert_flags(tmp_path)}--split 100,0,0 {NO_DROPOUT}{UNCLIPPED}"
    flags += "--num-layers 8 --train-iters 2 --eval-iters 0 "
    ours = PP4 + "--pipeline-schedule bitpipe "
    found = train(4, flags + ours, model="bert", device="musa")
    assert_equal(found, train(4, flags + PP2, model="bert"))
