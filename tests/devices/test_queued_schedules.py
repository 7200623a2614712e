"""Static schedules on a device that runs behind the host, over its communicators: the CPU's bits.

What is emulated, and what it stands for: `tests/fake_musa/README.md`. With one hardware queue a
receive that is posted too early stops a rank; with eight a missing wait reads poison.
"""

from __future__ import annotations

import pytest

from tests.fake_musa.queued import queued
from tests.schedules.runtime.capture import GPT, PP2, PP4, train
from tests.schedules.runtime.test_equality import UNCLIPPED, VPP2, assert_equal, stock

pytestmark = pytest.mark.usefixtures("emulated_musa")

_FLAGS = GPT + UNCLIPPED + "--num-layers 8 --global-batch-size 16 --train-iters 2 "

_CASES = {
    "gpipe": (PP4, PP4),
    "1f1b": (PP4, PP4),
    "interleaved": (PP4 + VPP2, PP4 + VPP2),
    "zb-h1": (PP4, PP4),
    "zb-v": (PP4, PP4),
    "v-half": (PP4, PP4),
    "dualpipe-v": (PP4, PP4),
    "dualpipe": (PP4, PP2),
    "bitpipe": (PP4, PP2),
    "bitpipe --bitpipe-order paper": (PP4, PP2),
}


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("schedule", _CASES)
def test_every_schedule_over_its_communicators(schedule: str, connections: int) -> None:
    ours, theirs = _CASES[schedule]
    flags = f"{_FLAGS}{ours}--pipeline-schedule {schedule} --pipeline-transport torch "
    env = queued(connections=connections, jitter_us=100, seed=connections)
    found = train(4, flags, device="musa", env=env)
    assert found.tables[0].split()[0] == schedule.split(maxsplit=1)[0]
    assert found.transports == ["TorchTransport"]
    assert_equal(found, stock(4, _FLAGS + theirs))
