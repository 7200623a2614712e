"""Steps on a device that runs behind the host: the CPU's bits, whatever is late.

`tests/test_matrix.py` has every schedule there. What is emulated, and what it stands for:
`tests/fake_musa/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from megatron_ext import devices
from megatron_ext.runtime.split import SplitBackward, WeightGradient
from megatron_ext.schedules import Action
from megatron_ext.transport import torch_dist  # noqa: F401  (mutants are looked for there)
from megatron_ext.upstream.signatures import parameters
from tests.disaggregation.test_training import FBD, RECOMPUTE, SHIP, run_role, together
from tests.fake_musa.queued import queued
from tests.features.slices.length_training import Job
from tests.features.slices.length_training import train as train_lengths
from tests.features.slices.test_length_training import (
    DYNAMIC,
    EXPERTS,
    FEW,
    LENGTHS,
    PACKS,
    STEPS,
    T,
    assert_same_bits,
    by_step,
)
from tests.features.slices.test_sliced_compute import BALANCED, FULL, RECOMPUTED
from tests.ranks import RanksFailed, run_ranks
from tests.runtime.capture import GPT, PP2, PP4, run_here, train
from tests.runtime.test_equality import UNCLIPPED, assert_equal, paired, stock
from tests.training.helpers import LLAMA, MLA

pytestmark = pytest.mark.usefixtures("emulated_musa")

_FLAGS = GPT + UNCLIPPED + "--num-layers 8 --global-batch-size 16 --train-iters 2 "


@pytest.mark.short_s(8)
@pytest.mark.parametrize("connections", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("zb-v", ""),
        *(
            pytest.param(name, "", marks=pytest.mark.slow)
            for name in (
                *("1f1b", "interleaved", "zb-h1", "v-half", "dualpipe-v", "dualpipe"),
                *("bitpipe", "bitpipe, paper", "csv", "gathered"),
            )
        ),
        pytest.param("zb-v", "--use-dpp ", marks=pytest.mark.slow),
    ],
)
def test_pairs_have_a_stream_for_communication(
    name: str, more: str, connections: int, tmp_path: Path
) -> None:
    """A plan frees nothing behind its forward that the backward or W reads."""
    ranks, ours, theirs = paired(name, tmp_path)
    env = queued(connections=connections, jitter_us=100, seed=connections)
    found = train(ranks, ours + more, device="musa", env=env)
    assert found.pairs > 0
    assert_equal(found, stock(ranks, theirs))


@pytest.mark.short_s(6)  # the only short case of slices on a device that runs behind
@pytest.mark.parametrize(
    ("model", "connections"),
    [
        pytest.param("", 8, id="gpt, 8"),
        pytest.param("", 1, id="gpt, 1", marks=pytest.mark.slow),
        pytest.param(MLA, 8, id="latent, 8", marks=pytest.mark.slow),
        pytest.param(MLA, 1, id="latent, 1", marks=pytest.mark.slow),
        pytest.param(
            LLAMA + BALANCED + FULL, 8, id="experts, 8", marks=pytest.mark.slow
        ),
        pytest.param(
            LLAMA + BALANCED + FULL, 1, id="experts, 1", marks=pytest.mark.slow
        ),
    ],
)
def test_slices_keep_what_later_ones_read(model: str, connections: int) -> None:
    flags = f"{GPT}{UNCLIPPED}{PP2}{model}--pipeline-slices 4 --pipeline-schedule zb-v --use-dpp "
    env = queued(connections=connections, jitter_us=100, seed=connections)
    assert_equal(train(2, flags, device="musa", env=env), train(2, flags))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_layers_that_gather_their_input_ahead_of_w(schedule: str) -> None:
    """Sequence parallelism: W gathers the next layer's input while a product of this one runs."""
    connections = (
        1  # before Blackwell, Megatron demands one queue with tensor parallelism
    )
    sizes = f"{_FLAGS}{PP2}--tensor-model-parallel-size 2 --sequence-parallel "
    env = queued(connections=connections, jitter_us=100, seed=connections)
    found = train(4, f"{sizes}--pipeline-schedule {schedule} ", device="musa", env=env)
    assert found.transports == ["TorchTransport"]
    assert_equal(found, stock(4, sizes))


@dataclass
class _Product(WeightGradient):
    """A weight gradient whose operands belong to the stream of its layer."""

    weights: list[torch.nn.Parameter]
    operands: list[torch.Tensor]

    def compute(self) -> list[torch.Tensor]:
        return [self.operands.pop().t() @ self.operands.pop()]


def _beside_the_rest() -> list[float]:
    """Return the gradient of a layer in a stream of its own, whose next kernels are there."""
    device = devices.current().torch_device(0)
    runtime = torch.get_device_module(device)
    split, side = SplitBackward(), runtime.Stream(device)
    weight = torch.nn.Parameter(torch.zeros(8, 8, device=device))
    for microbatch in range(4):
        with runtime.stream(side), split.defer(0, microbatch):
            operands = [
                torch.full((8, 8), 1.0 + microbatch, device=device) for _ in range(2)
            ]
            assert split.record is not None
            split.record(_Product([weight], operands))
            del operands
        runtime.current_stream(device).wait_stream(side)
    for microbatch in range(4):
        split.run(0, microbatch)
        with runtime.stream(side):
            for _ in range(4):  # takes the memory that W has freed
                torch.full((8, 8), -1.0, device=device)
    return weight.grad.flatten().tolist()


@pytest.mark.parametrize("connections", [1, 8])
def test_w_reads_its_operands_in_the_stream_of_its_layer(connections: int) -> None:
    """Megatron's shared experts run in a stream of their own, which gets its memory back at W."""
    env = queued(connections=connections, kernel_us=500)
    [found] = run_ranks(1, _beside_the_rest, device="musa", env=env)
    assert found == [8.0 * (1 + 4 + 9 + 16)] * 64


class _KeptProduct(_Product):
    """The same, with operands that stay as long as it does, as those of linear layers do."""

    def compute(self) -> list[torch.Tensor]:
        return [self.operands[1].t() @ self.operands[0]]


def _beside_actions() -> list[float]:
    """Return the gradient that W in a stream of low priority, and a whole backward, add to."""
    backend = devices.current()
    device = backend.torch_device(0)
    from megatron_ext.features.pairs.waiting_weights import DeviceWeights, SideStreams

    split, streams = SplitBackward(), SideStreams.of_device(backend, device)
    weight, *others = (
        torch.nn.Parameter(torch.zeros(8, 8, device=device)) for _ in range(5)
    )
    row = tuple(
        map(Action.parse, ("0I0", "0I1", "0W0", "0I2", "0W1", "0I3", "0W2", "0W3"))
    )
    weights = DeviceWeights(row, split, streams)
    with streams.around_step():
        large_operands = [torch.full((8, 8), 2.0**14, device=device) for _ in range(2)]
        for action in row:
            if action.kind == "W":
                if action == row[-1]:  # a whole backward, while this W is still running
                    with split.defer(0, 4):
                        split.record(_KeptProduct([weight], large_operands))
                    split._catch_up(weight)
                weights.finish(0, action.microbatch)
                for _ in range(4):  # takes the memory of its operands
                    torch.full((8, 8), -1.0, device=device)
                continue
            with split.defer(0, action.microbatch):
                for layer in (
                    *others,
                    weight,
                ):  # the other layers make the weight's sum late
                    value = 1.0 + action.microbatch
                    operands = [
                        torch.full((8, 8), value, device=device) for _ in range(2)
                    ]
                    split.record(_KeptProduct([layer], operands))
                del operands
            weights.ended(action)
            assert len(weights._launched) <= 2, "the table bounds what waits"
        weight.grad.mul_(2)
    return weight.grad.flatten().tolist()


@pytest.mark.parametrize("connections", [1, 8])
def test_w_beside_actions_keeps_its_operands_and_its_order(connections: int) -> None:
    env = queued(
        connections=connections, kernel_us=500, jitter_us=300, seed=connections
    )
    [gradient] = run_ranks(1, _beside_actions, device="musa", env=env)
    # The sum before, 8 * (1 + 4 + 9 + 16), changes the large number only as a whole.
    assert gradient == [2 * (2.0**31 + 256)] * 64


class _Spending(WeightGradient):
    """A weight gradient that takes 10 ms and computes nothing."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weights = (weight,)

    def compute(self) -> list[torch.Tensor | None]:
        torch.ops.fake_musa.spend(0, 10_000)
        return [None]


def _exchanges_with_weights(num_waiting: int) -> float:
    """Return the milliseconds of three I, each behind an exchange, and their W.

    An exchange takes 20 ms, and an I or a W 10 ms. With none waiting, W runs in the actions'
    stream, as without the flag.
    """
    from megatron_ext.features.pairs.waiting_weights import DeviceWeights, SideStreams

    backend = devices.current()
    device = backend.torch_device(0)
    split, streams = SplitBackward(), SideStreams.of_device(backend, device)
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    words = "0I0 0W0 0I1 0W1 0I2 0W2"
    if num_waiting:
        words = "0I0 0I1 0W0 0I2 0W1 0W2"
    row = tuple(Action.parse(word) for word in words.split())
    weights = DeviceWeights(row, split, streams) if num_waiting else None
    exchanges = torch.musa.Stream(device, priority=-1)
    begin, end = (torch.musa.Event(enable_timing=True) for _ in range(2))
    flag = torch.zeros(1, dtype=torch.int32)
    torch.ops.fake_musa.spin(0, flag)  # until everything is queued
    begin.record()
    with streams.around_step():
        for action in row:
            if action.kind == "W":
                if weights is None:
                    split.run(0, action.microbatch)
                else:
                    weights.finish(0, action.microbatch)
                continue
            exchanges.wait_stream(streams.actions)
            with torch.musa.stream(exchanges):
                torch.ops.fake_musa.spend(0, 20_000, 0.0)
            streams.actions.wait_stream(exchanges)
            torch.ops.fake_musa.spend(0, 10_000)
            with split.defer(0, action.microbatch):
                split.record(_Spending(weight))
            if weights is not None:
                weights.ended(action)
    end.record()
    flag.fill_(1)
    torch.musa.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize(
    ("num_waiting", "fills", "expected_ms"), [(0, 1, 120), (1, 1, 100), (1, 0, 120)]
)
def test_weights_fill_waits_only_on_a_device_that_overlaps_them(
    num_waiting: int, fills: int, expected_ms: float
) -> None:
    """The clock is the device's own, so the time does not depend on the machine."""
    env = queued(connections=32, lag_us=1e6, shared=1, fills=fills)
    [took_ms] = run_ranks(
        1, _exchanges_with_weights, num_waiting, device="musa", env=env
    )
    assert round(took_ms) == expected_ms


@pytest.mark.slow
@pytest.mark.parametrize("connections", [8, 1])
@pytest.mark.parametrize(
    "name",
    [
        *("zb-h1", "zb-v", "v-half", "dualpipe-v", "dualpipe", "bitpipe", "csv"),
        *("all recomputed", "latent"),
    ],
)
def test_w_that_fills_waits_keeps_the_bits(
    name: str, connections: int, tmp_path: Path
) -> None:
    ranks, ours, theirs = paired(name, tmp_path)
    env = queued(connections=connections, jitter_us=100, seed=connections)
    ours += "--pipeline-waiting-weights 3 "
    if "comp_stream" in parameters("megatron.core.pipeline_parallel.utils:set_streams"):
        with pytest.raises(RanksFailed, match="or later on a device"):
            train(ranks, ours, device="musa", env=env)
        return
    trained = train(ranks, ours, device="musa", env=env)
    assert_equal(trained, stock(ranks, theirs))


Waits = dict[tuple[str, str, str], int]
"""What made the host wait in a step: (what, line of the source, thread)."""


def _count_waits() -> list[Waits]:
    """Return a list that each later step of this process extends by its waits.

    They are those between its first and last action.
    """
    from torch_musa import host_waits

    from megatron_ext.runtime import runtime

    waits_by_step: list[Waits] = []

    class CountingExecutor(runtime.Executor):
        def run(self) -> None:
            host_waits.reset()
            super().run()
            waits_by_step.append(host_waits.by_line())

    runtime.Executor = CountingExecutor  # type: ignore[misc]  # this process is a rank and ends
    return waits_by_step


def _waits_in_steps(argv: list[str]) -> list[Waits]:
    """Train with Megatron's script, and return the waits of its steps."""
    waits_by_step = _count_waits()
    run_here("gpt", argv)
    return waits_by_step


def _waits_of_lengths(job: Job) -> list[Waits]:
    """Train on micro-batches of given lengths, and return the waits of the steps."""
    waits_by_step = _count_waits()
    train_lengths(job)
    return waits_by_step


_WAYS = {
    "torch": "--pipeline-transport torch ",
    "ipc": "--pipeline-transport shm --pipeline-device-path ipc ",
    "staged": "--pipeline-transport shm --pipeline-device-path staged ",
    "tcp": "--pipeline-transport tcp ",
}


@pytest.mark.parametrize("way", _WAYS)
def test_the_host_never_waits_in_a_step_of_a_table(way: str) -> None:
    _check_waits(_WAYS[way], 8)


@pytest.mark.parametrize("connections", [1, 8])
def test_the_host_never_waits_in_a_step_of_slices(connections: int) -> None:
    _check_waits("--pipeline-slices 4 --pipeline-transport shm ", connections)


@pytest.mark.parametrize("connections", [1, 8])
def test_the_host_never_waits_in_a_step_of_slices_by_length(connections: int) -> None:
    flags = "--pipeline-slice-tokens 4 --pipeline-transport shm "
    _check_waits(flags, connections)


@pytest.mark.parametrize("connections", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_the_host_never_waits_for_packed_samples(connections: int) -> None:
    """Ranks without data have learnt their bounds before the step.

    Without Transformer Engine, rotary embeddings and the attention of packed samples wait.
    """
    microbatches = ([((3, 14), 8, (5, 5, 21))], [(8, (1, 16), (9, 2, 30))])
    job = Job(
        microbatches,
        schedule="zb-h1",
        pp=2,
        tp=2,
        settings={"slice_tokens": T, "transport": "shm"},
        is_packed=True,
        only_first_reads=True,
    )
    env = queued(connections=connections)
    for steps in run_ranks(4, _waits_of_lengths, job, device="musa", env=env):
        assert len(steps) == 2
        for _, where in chain.from_iterable(_waits_of_training(steps)):
            assert "/megatron_ext/" not in where or where.endswith(" attend"), where


@pytest.mark.parametrize("connections", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            Job(by_step(*STEPS[:3]), schedule="zb-v", pp=2, settings=DYNAMIC),
            id="dynamic",
        ),
        pytest.param(
            Job([PACKS, PACKS], schedule="zb-h1", pp=2, is_packed=True),
            id="packed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Job(
                [PACKS[:1]] * 2,
                schedule="zb-v",
                pp=2,
                tp=2,
                settings=DYNAMIC,
                model=RECOMPUTED,
                is_packed=True,
                only_first_reads=True,
            ),
            id="packed and recomputed, data on the first tensor-parallel rank only",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Job([[LENGTHS, FEW]], schedule="zb-h1", pp=2, model=EXPERTS, ep=2),
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_slices_by_length_keep_the_bits(job: Job, connections: int) -> None:
    """Steps with other lengths each, some of which are empty."""
    job = replace(job, settings={"slice_tokens": T, **job.settings})
    env = queued(connections=connections, jitter_us=100, seed=connections)
    ranks = run_ranks(job.num_ranks, train_lengths, job, device="musa", env=env)
    assert_same_bits(ranks, run_ranks(job.num_ranks, train_lengths, job))


def _check_waits(more_flags: str, connections: int) -> None:
    flags = f"{_FLAGS}{PP2}--pipeline-schedule zb-h1 {more_flags}"
    flags += "--no-check-for-nan-in-loss-and-grad "
    env = queued(connections=connections)
    for steps in run_ranks(2, _waits_in_steps, flags.split(), device="musa", env=env):
        assert _waits_of_training(steps) == [[]] * 2


def _waits_of_training(steps: list[Waits]) -> list[list[tuple[str, str]]]:
    """Return what made the training's thread wait, and where, by step."""
    waits_by_step = []
    for waits in steps:
        lines = []
        for what, where, thread in waits:
            # The threads beside a staged transport are there to wait. In 0.16 Megatron's script
            # waits for copies of lengths.
            if "megatron-ext" in thread or "_broadcast_cu_seqlens" in where:
                continue
            lines.append((what, where))
        waits_by_step.append(lines)
    return waits_by_step


_ORDERS = {
    "zb-v": "--pipeline-schedule zb-v ",
    "dynamic": "--pipeline-schedule zb-h1 --use-dpp ",
    "Megatron's own": "",
}


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("activations", ["", SHIP + RECOMPUTE])
def test_disaggregation(activations: str, connections: int) -> None:
    flags = _FLAGS + PP2 + activations.removeprefix(SHIP)
    env = queued(connections=connections, jitter_us=100, seed=connections)
    shipped = SHIP if activations else ""
    words = (flags + FBD + shipped).split()
    ours, _ = together(
        run_ranks(4, run_role, words, device="musa", env=env, timeout_s=240)
    )
    assert_equal(ours, stock(2, flags))


_DELAYS = {"jitter_us": 300, "kernel_us": 5, "copy_us": 20}
_QUICK_SEEDS, _SEEDS = 2, 20
_DELAYED = {  # how tensors travel, in which order; the first two also run in the quick tests
    "table by torch": _WAYS["torch"] + _ORDERS["zb-v"],
    "dynamic by ipc": _WAYS["ipc"] + _ORDERS["dynamic"],
    "table by ipc": _WAYS["ipc"] + _ORDERS["zb-v"],
    "dynamic by staged": _WAYS["staged"] + _ORDERS["dynamic"],
    "dynamic by tcp": _WAYS["tcp"] + _ORDERS["dynamic"],
}


_WITH_SEEDS = [
    pytest.param(
        name, seed, marks=() if number < 2 and seed < _QUICK_SEEDS else pytest.mark.slow
    )
    for number, name in enumerate(_DELAYED)
    for seed in range(_SEEDS)
]


@pytest.mark.parametrize(("name", "seed"), _WITH_SEEDS)
def test_delays_of_many_seeds(name: str, seed: int) -> None:
    env = queued(connections=(1, 8)[seed % 2], seed=seed, **_DELAYS)
    found = train(4, f"{_FLAGS}{PP4}{_DELAYED[name]}", device="musa", env=env)
    assert_equal(found, stock(4, _FLAGS + PP4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_SEEDS))
def test_delays_of_many_seeds_between_disaggregated_ranks(seed: int) -> None:
    flags = _FLAGS + PP2
    env = queued(connections=(1, 8)[seed % 2], seed=seed, **_DELAYS)
    words = (flags + FBD).split()
    ours, _ = together(
        run_ranks(4, run_role, words, device="musa", env=env, timeout_s=240)
    )
    assert_equal(ours, stock(2, flags))
