"""Megatron's own schedules compute the same whoever carries their messages."""

from __future__ import annotations

import pytest

from .capture import GPT, PP2, PP4, train
from .test_equality import EIGHT_LAYERS, VPP2, assert_equal, stock

SHM = "--pipeline-transport shm "
EVALUATED = "--eval-iters 1 --eval-interval 2 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, PP2),
        (4, PP4),
        (4, PP2 + TP2),
        (2, PP2 + VPP2 + EVALUATED),
        (4, PP4 + VPP2 + EIGHT_LAYERS + "--no-overlap-p2p-communication " + EVALUATED),
    ],
)
def test_same_over_shared_memory(num_ranks: int, flags: str) -> None:
    ours = train(num_ranks, GPT + flags + SHM)
    assert len(ours.transports) == 1
    assert ours.transports != ["TorchTransport"]
    assert ours.tables == []  # Megatron's schedule ran
    assert_equal(ours, stock(num_ranks, GPT + flags))
