"""Reductions start as soon as a chunk's gradients are complete, and gathers one chunk ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatron_ext.runtime.program import Table, make_table
from megatron_ext.runtime.split import SplitBackward
from megatron_ext.runtime.sync import TrainingSync
from megatron_ext.schedules.table.actions import Action
from megatron_ext.schedules.table.communication import reduction_order
from tests.pipelines import make_pipeline
from tests.ranks import run_ranks

from . import fake
from .capture import GPT, PP2, run_here

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import Tensors


class Chunk(torch.nn.Module):
    """State of a chunk under DDP: whether its hooks are silent, and reductions by hand."""

    grad_reduce_handle = "a reduction that runs"

    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__()
        self.number, self.log, self.silent = number, log, 0
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.params = {self.weight}
        self.bucket_groups = [self]
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        self.expert_parallel_bucket_groups: list[Any] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.silent += 1
        yield
        self.silent -= 1

    def start_grad_sync(self, *_: Any, force_all_reduce: bool = False) -> None:
        self.log.append(f"reduce {self.number}" + (" all" if force_all_reduce else ""))


def replay(
    schedule: str,
    pp: int,
    change: Callable[[Any, list[Chunk]], None] = lambda *_: None,
    *,
    force_all_reduce: bool = False,
    **options: str,
) -> tuple[list[str], Table, list[Chunk]]:
    """Execute the row of rank 0; log what starts, and windows in which hooks may."""
    num_chunks = 2 if schedule == "interleaved" else None
    pipeline = make_pipeline(schedule, pp, 4, num_chunks, options=options)
    table = make_table(pipeline, 4, 0, backward=True)
    log: list[str] = []
    chunks = [Chunk(i, log) for i in range(len(table.schedule.placement.stages_of[0]))]
    config = SimpleNamespace(
        grad_sync_func=None,
        param_sync_func=None,
        no_sync_func=[c.no_sync for c in chunks],
    )
    change(config, chunks)

    class Computed(fake.Compute):
        def run(self, action: Action, *args: Any, **kwargs: Any) -> Tensors:
            log.append(str(action))
            log.extend(f"window {c.number}" for c in chunks if not c.silent)
            return super().run(action, *args, **kwargs)

    sync = TrainingSync(
        config, chunks, table, SplitBackward(), force_all_reduce=force_all_reduce
    )
    with sync:
        fake.executor(table, Computed(), fake.Wire(0), sync).run()
    assert not any(chunk.silent for chunk in chunks)
    return log, table, chunks


def by_ddp(config: Any, _: list[Chunk]) -> None:
    """Do as a program that gives Megatron no `no_sync_func`."""
    config.no_sync_func = None


@pytest.mark.parametrize("change", [lambda *_: None, by_ddp], ids=["given", "by DDP"])
@pytest.mark.parametrize(
    ("schedule", "pp"), [("bitpipe", 4), ("zb-v", 2), ("zb-h1", 2)]
)
def test_a_split_chunk_is_reduced_right_after_its_last_w(
    schedule: str, pp: int, change: Callable[[Any, list[Chunk]], None]
) -> None:
    log, table, chunks = replay(schedule, pp, change)
    for chunk in chunks:
        stage = table.schedule.placement.stages_of[0][chunk.number]
        before = log[log.index(f"reduce {chunk.number}") - 1]
        assert before == [entry for entry in log if entry.startswith(f"{stage}W")][-1]
    assert sum(entry.startswith("reduce") for entry in log) == len(chunks)
    assert not any(entry.startswith("window") for entry in log), "hooks would run in I"


def test_reductions_do_not_wait_for_the_end_of_the_step() -> None:
    log, table, _ = replay("bitpipe", 4)
    first = next(i for i, entry in enumerate(log) if entry.startswith("reduce"))
    assert first < len(table.exchanges) - 1


def by_others(_: Any, chunks: list[Chunk]) -> None:
    """Do as a program with a DDP that is not Megatron's."""
    for chunk in chunks:
        del chunk.ddp_config


@pytest.mark.parametrize(
    "change", [lambda *_: None, by_others], ids=["Megatron's", "others'"]
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_hooks_reduce_during_the_last_full_backward_of_a_chunk(
    schedule: str, change: Callable[[Any, list[Chunk]], None]
) -> None:
    log, table, chunks = replay(schedule, 2, change)
    for chunk in chunks:
        stage = table.schedule.placement.stages_of[0][chunk.number]
        assert log[log.index(f"window {chunk.number}") - 1] == f"{stage}B3"
        assert log.count(f"window {chunk.number}") == 1
    assert not any(entry.startswith("reduce") for entry in log)


def test_aligned_reductions_are_called_for_once_for_each_chunk() -> None:
    called: list[int] = []

    def align(config: Any, chunks: list[Chunk]) -> None:
        config.grad_sync_func = [lambda _, n=c.number: called.append(n) for c in chunks]

    log, _, _ = replay("interleaved", 2, align)
    assert sorted(called) == [0, 1]
    assert not any(entry.startswith(("reduce", "window")) for entry in log)


def own(config: Any, chunks: list[Chunk]) -> None:
    """Do as Megatron does with `--align-grad-reduce`, its default."""
    config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_aligned_hooks_reduce_during_the_last_backward_of_stage_0_only(
    schedule: str,
) -> None:
    """Everybody waits for other backwards; the reduction of their chunks starts after them."""
    log, table, chunks = replay(schedule, 2, own)
    assert [entry for entry in log if entry.startswith("window")] == ["window 0"]
    assert log[log.index("window 0") - 1] == "0B3"
    for chunk in chunks[1:]:
        stage = table.schedule.placement.stages_of[0][chunk.number]
        assert log[log.index(f"reduce {chunk.number}") - 1] == f"{stage}B3"
    assert "reduce 0" not in log


@pytest.mark.parametrize(
    "change", [own, lambda *_: None], ids=["aligned", "as they complete"]
)
def test_twins_open_no_window(change: Callable[[Any, list[Chunk]], None]) -> None:
    """Replicas may complete their chunks in another order."""
    log, _, chunks = replay("bitpipe", 4, change, order="paper")
    assert not any(entry.startswith("window") for entry in log)
    assert sum(entry.startswith("reduce") for entry in log) == len(chunks)


def test_aligned_split_chunks_are_reduced_all_the_same() -> None:
    log, _, chunks = replay("zb-v", 2, own, force_all_reduce=True)
    assert [entry for entry in log if entry.startswith("reduce")] == [
        f"reduce {number} all" for number in reversed(range(len(chunks)))
    ]


@pytest.mark.parametrize("silences", [True, False])
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_without_overlap_nothing_starts(schedule: str, silences: bool) -> None:
    """Also for programs that give a `no_sync_func` all the same."""

    def alone(config: Any, chunks: list[Chunk]) -> None:
        config.no_sync_func = config.no_sync_func if silences else None
        for chunk in chunks:
            chunk.ddp_config.overlap_grad_reduce = False

    log, _, chunks = replay(schedule, 2, alone)
    # A chunk that is not silenced has windows in this log, in which its hooks do nothing.
    assert not any(entry.startswith("reduce") for entry in log)
    assert len(chunks) == 1


def test_everything_can_be_reduced_everywhere() -> None:
    log, _, _ = replay("zb-h1", 2, force_all_reduce=True)
    assert log[-1] == "reduce 0 all"


def test_parameters_are_gathered_one_chunk_ahead() -> None:
    def gather(config: Any, chunks: list[Chunk]) -> None:
        config.param_sync_func = [
            lambda _, c=c: c.log.append(f"gather {c.number}") for c in chunks
        ]

    log, table, _ = replay("bitpipe", 4, gather)
    stages = table.schedule.placement.stages_of[0]
    firsts = [log.index(f"{stage}F0") for stage in stages]
    gathers = [log.index(f"gather {number}") for number in range(4)]
    assert gathers == sorted(gathers)
    assert all(gather < first for gather, first in zip(gathers, firsts, strict=True))
    assert gathers[1] < firsts[0] < gathers[2] < firsts[1]


Reductions = tuple[TrainingSync, list[int], list[Chunk], list[str]]
"""Of rank 0: its stages and chunks in the order in which they are reduced, and the log."""


@pytest.fixture
def zb_v() -> Reductions:
    """Return those of a table with two split chunks."""
    table = make_table(make_pipeline("zb-v", 2, 4), 4, 0, backward=True)
    log: list[str] = []
    chunks = [Chunk(i, log) for i in range(2)]
    config = SimpleNamespace(
        grad_sync_func=None,
        param_sync_func=None,
        no_sync_func=[c.no_sync for c in chunks],
    )
    sync = TrainingSync(config, chunks, table, SplitBackward(), force_all_reduce=False)
    stages = list(reduction_order(table.schedule.rows[0]))
    return (
        sync,
        stages,
        [chunks[table.schedule.placement.chunk_of(s)] for s in stages],
        log,
    )


def test_a_chunk_that_is_complete_too_early_waits_for_its_turn(
    zb_v: Reductions,
) -> None:
    """Replicas that choose their order start the same reductions in the same order."""
    sync, (first, second), chunks, log = zb_v
    with sync:
        sync.after(second)
        assert log == []
        sync.after(first)
    assert log == [f"reduce {chunk.number}" for chunk in chunks]


class Buckets:
    """A bucket group of some parameters."""

    def __init__(self, name: str, params: list[torch.Tensor], log: list[str]) -> None:
        self.name, self.params, self.log = name, set(params), log
        self.grad_reduce_handle = "a reduction that runs"

    def start_grad_sync(self, **_: Any) -> None:
        self.log.append(self.name)


def test_buckets_are_reduced_as_weights_are_done_in_one_order(zb_v: Reductions) -> None:
    """Also where those of experts are done out of turn."""
    sync, (first, second), (chunk, _), log = zb_v
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    chunk.extra = torch.nn.ParameterList(weights)
    chunk.bucket_groups = [
        Buckets("middle", [weights[0], weights[2]], log),
        Buckets("last", [weights[3]], log),
    ]
    chunk.expert_parallel_bucket_groups = [Buckets("experts", [weights[1]], log)]
    ids = [id(weight) for weight in weights]
    with sync:
        with sync.around_last(Action(second, "W", 0)):
            assert sync._splits._progress is None, "it is not its turn"
        with sync.around_last(Action(first, "W", 0)):
            progress = sync._splits._progress
        assert progress is not None
        progress({*ids})
        progress({ids[0], ids[2], ids[3]})
        assert log == [], "the experts wait for the last"
        progress({ids[0], ids[2]})
        assert log == ["last", "experts"]
        progress({ids[0]})
        assert log == ["last", "experts"]
        sync.after(first)
        assert log == ["last", "experts", "middle"]
        with sync.around_last(Action(second, "W", 0)):
            assert sync._splits._progress is not None


def last_step(argv: list[str]) -> list[str]:
    """Train; return what this rank did in the last step: weights done, backwards, reductions."""
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucketGroup as Group,
    )

    from megatron_ext.runtime import runtime, split
    from megatron_ext.runtime.compute import StageCompute

    log: list[str] = []
    accumulate, start, backward = (
        split.accumulate,
        Group.start_grad_sync,
        StageCompute.backward,
    )

    class Executor(runtime.Executor):
        def run(self) -> None:
            log.clear()
            super().run()

    def accumulating(gradients: Any, fetching: Any) -> None:
        accumulate(gradients, fetching)
        log.append("W")

    def going_back(*args: Any, **named: Any) -> Any:
        gradients = backward(*args, **named)
        log.append("B")
        return gradients

    def starting(group: Any, **flags: Any) -> None:
        if group.grad_reduce_handle is None:
            log.append(f"reduce {sum(p.numel() for p in group.params)}")
        start(group, **flags)

    split.accumulate, Group.start_grad_sync = accumulating, starting
    StageCompute.backward = going_back  # type: ignore[method-assign]
    runtime.Executor = Executor  # type: ignore[misc]
    run_here("gpt", argv)
    return log


@pytest.mark.usefixtures("a_training_loop")
@pytest.mark.parametrize(("schedule", "unit"), [("zb-h1", "W"), ("1f1b", "B")])
def test_the_first_stage_reduces_during_its_last_w_or_b(
    schedule: str, unit: str
) -> None:
    """Megatron gives it several buckets, and other stages one."""
    flags = f"{GPT}{PP2}--overlap-grad-reduce --ddp-num-buckets 4 --pipeline-schedule {schedule}"
    logs = run_ranks(4, last_step, flags.split())
    assert logs[0] == logs[1]
    assert logs[2] == logs[3]
    first = [entry for entry in logs[0] if entry.startswith("reduce")]
    assert len(first) == 4
    early = logs[0][: len(logs[0]) - logs[0][::-1].index(unit)]
    assert sum(entry.startswith("reduce") for entry in early) >= 2
    assert logs[2][-2] == unit
    assert logs[2][-1].startswith("reduce")
