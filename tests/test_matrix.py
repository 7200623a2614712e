"""Every schedule trains with the bits of Megatron's own, on every device, wire and parallelism.

One case of each pair of a schedule, a carrier (a device and a wire) and a parallelism: losses,
gradients and parameters of a training with evaluations in between are those of Megatron's own
schedule on the CPU. Gradients are summed in the order of the micro-batches in all of them. The
norm that clips them is added up rank by rank, and a placement has its stages on other ranks, so
nothing is clipped. With MEGATRON_LM_PATH, upstream's script trains.

The emulated device runs behind its host (`tests/fake_musa/README.md`): with one hardware queue a
receive that is posted too early stops a rank, with eight a missing wait reads poison.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

import pytest

from megatron_ext.transport import torch_dist  # noqa: F401  (mutants are looked for there)
from tests.fake_musa.queued import queued
from tests.runtime.capture import GPT, PP2, PP4, train
from tests.runtime.test_equality import (
    EP2,
    OVERLAP,
    RECOMPUTE,
    SHARDED,
    TP2,
    UNCLIPPED,
    VPP2,
    assert_equal,
    stock,
)
from tests.training.helpers import LLAMA, MOE

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEDULES = {
    "1f1b": "",
    "gpipe": "",
    "zb-h1": "",
    "interleaved": VPP2,
    "zb-v": "",
    "v-half": "",
    "dualpipe-v": "",
    "dualpipe": "",
    "bitpipe": "",
    "bitpipe, the paper's order": "--bitpipe-order paper --bitpipe-routing local ",
    "1f1b, dynamic": "--use-dpp ",
    "interleaved, dynamic": VPP2 + "--use-dpp ",
    "zb-h1, dynamic": "--use-dpp ",
    "Megatron's own": "",
}
DEVICE_WIRES = {"torch": "Torch", "ipc": "Direct", "staged": "Staged", "tcp": "Staged"}
WIRES = {
    "ipc": "shm --pipeline-device-path ipc",
    "staged": "shm --pipeline-device-path staged",
}
CARRIERS = {
    f"{device} {wire}": (connections, f"--pipeline-transport {flags} ", opened)
    for device, connections, wires in (
        ("cpu", 0, {"torch": "Torch", "shm": "Native", "tcp": "Native"}),
        ("one queue", 1, DEVICE_WIRES),
        ("eight queues", 8, DEVICE_WIRES),
    )
    for wire, opened in wires.items()
    for flags in [WIRES.get(wire, wire)]
}
"""By device and wire: hardware queues, flags, and the transport that opens."""
PARALLELISM = {
    "two stages": (1, ""),
    "four stages": (1, ""),
    "tensor": (2, TP2),
    "replicas": (2, OVERLAP),
    "sharded": (2, SHARDED),
    "recompute": (1, RECOMPUTE),
    "untied": (1, LLAMA),
    "moe": (1, LLAMA + MOE),
    "experts": (2, LLAMA + MOE + EP2 + SHARDED),
}
"""Ranks for each stage, and flags."""


class Case(NamedTuple):
    """Keys of the tables above."""

    schedule: str
    carrier: str
    parallelism: str

    @property
    def is_twins(self) -> bool:
        """Both directions hold the model: two replicas of half as many stages."""
        return (
            self.schedule.startswith(("bitpipe", "dualpipe"))
            and self.schedule != "dualpipe-v"
        )

    def trains(self) -> bool:
        """Some pairs are no training, or not one with these bits."""
        return not (
            # Nothing of it would be ours.
            (self.schedule == "Megatron's own" and self.carrier.endswith("torch"))
            # torch.distributed cannot tell which messages have arrived.
            or ("dynamic" in self.schedule and self.carrier.endswith("torch"))
            # Before Blackwell, Megatron demands one queue with tensor parallelism.
            or (self.carrier.startswith("eight") and self.parallelism == "tensor")
            or (self.is_twins and self.parallelism == "four stages")
            # Tokens that cross to the twin are summed in its order (see test_equality.py).
            or (self.is_twins and self.parallelism == "experts")
        )


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Choose few cases with all pairs of values; the first ones have the most, of all values."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    lacking, used, chosen = set().union(*pairs.values()), Counter[str](), list[Case]()
    while lacking:
        best = max(
            pairs,
            key=lambda case: (
                len(pairs[case] & lacking),
                -sum(used[value] for value in case),
            ),
        )
        chosen.append(best)
        lacking -= pairs[best]
        used.update(best)
    return chosen


EVERY = [
    case
    for case in map(Case._make, product(SCHEDULES, CARRIERS, PARALLELISM))
    if case.trains()
]


def test_every_pair_occurs() -> None:
    chosen = pairwise(EVERY)
    assert len(chosen) < len(EVERY) / 5
    for column, other in combinations(range(len(Case._fields)), 2):
        asked = {(case[column], case[other]) for case in EVERY}
        assert {(case[column], case[other]) for case in chosen} == asked


@pytest.mark.short_s(40)
@pytest.mark.usefixtures("a_training_loop")
@pytest.mark.parametrize("case", pairwise(EVERY), ids=", ".join)
def test_bits_of_megatrons_own(case: Case, request: pytest.FixtureRequest) -> None:
    schedule = case.schedule.partition(",")[0]
    connections, wire, opened = CARRIERS[case.carrier]
    ranks_per_stage, flags = PARALLELISM[case.parallelism]
    flags = (
        f"{GPT}{UNCLIPPED}--num-layers 8 --global-batch-size 16 --train-iters 2 {flags}"
    )
    flags = flags.replace("--eval-iters 0", "--eval-iters 1").replace(
        "--eval-interval 2", "--eval-interval 1"
    )
    theirs = ours = PP4 if case.parallelism == "four stages" else PP2
    ranks = ranks_per_stage * (4 if case.parallelism == "four stages" else 2)
    if case.is_twins:
        ours, ranks = PP4, 4 * (2 if TP2 in flags else 1)
    ours += SCHEDULES[case.schedule] + wire
    if schedule == "Megatron's own":
        expected = []
    else:
        ours += f"--pipeline-schedule {schedule} "
        expected = [schedule, "forward-only"]
    if schedule == "interleaved":
        theirs += VPP2
    device = "musa" if connections else "cpu"
    env = {}
    if connections:
        request.getfixturevalue("emulated_musa")
        env = queued(connections=connections, jitter_us=100, seed=connections)
    found = train(ranks, flags + ours, device=device, env=env)
    assert [label.split()[0] for label in found.tables] == expected
    assert found.transports == [opened + "Transport"]
    assert_equal(found, stock(ranks, flags + theirs))
