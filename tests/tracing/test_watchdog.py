"""Jobs that hang end by themselves, and name the rank that holds them up. With real ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.tracing.hang import OUTSIDE
from tests.ranks import RankRun, run_ranks, start_ranks, train_here
from tests.runtime import toy
from tests.runtime.capture import GPT

RANKS, MICROBATCHES, TIMEOUT_S = 4, 6, 2.0


def train(kind: str, steps: int = 2) -> None:
    """Train on one rank until what is to go wrong goes wrong."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import schedules

    from megatron_ext.config import active
    from megatron_ext.runtime import runtime
    from tests.pipelines import make_pipeline, use

    toy.start(RANKS)
    rank = dist.get_rank()
    count = MICROBATCHES
    if kind == "wrong schedule":
        runtime.check_same_table = lambda *_: None  # this process is a rank and ends
        count -= 2 * (rank == 1)
    use(make_pipeline("1f1b", RANKS, count, hang_timeout_s=TIMEOUT_S))
    config = toy.config()
    calls = 0

    def forward_step(iterator: Any, model: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == MICROBATCHES + 2:
            if kind == "stall":
                time.sleep(60)
            elif kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return toy.forward_step(iterator, model)

    for _ in range(steps):
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=toy.samples(count),
            model=toy.chunks(config, [rank]),
            num_microbatches=count,
            seq_length=toy.LENGTH,
            micro_batch_size=toy.BATCH,
        )
    dist.barrier()  # as the next thing that all ranks do together
    active.clear_configuration()


def hang(kind: str) -> tuple[RankRun, str]:
    run = start_ranks(RANKS, train, kind, timeout_s=60)
    assert not run.timed_out, run.describe()
    return run, "\n".join(run.logs)


@pytest.mark.short_s(4)
@pytest.mark.parametrize(
    ("kind", "error", "end"),
    [
        ("stall", "rank 1 holds the job up: rank ", "rank 1, which runs 1F1 for "),
        pytest.param(
            "stop",
            "rank 1 holds the job up: rank ",
            " is stopped, by SIGSTOP or a debugger",
            marks=pytest.mark.slow,
        ),
        (
            "wrong schedule",
            "ranks 1, 2 hold each other up",
            "these ranks' tables do not match",
        ),
    ],
)
def test_a_job_that_hangs_ends_and_names_the_rank(
    kind: str, error: str, end: str
) -> None:
    run, text = hang(kind)
    assert any(run.exit_codes), run.describe()
    assert error in text, run.describe()
    assert end in text, run.describe()
    assert text.count("no rank makes progress: ") == 1, "the chain is printed once"
    # Every rank that can says what it waits for.
    assert "rank 0 waits for 1B" in text
    assert "rank 2 waits for 1F" in text or kind == "wrong schedule"


def test_a_job_that_goes_on_is_left_alone() -> None:
    run = start_ranks(RANKS, train, "nothing", 4, timeout_s=60)
    assert run.exit_codes == [0] * RANKS, run.describe()
    assert "no rank makes progress" not in "\n".join(run.logs)


def test_a_dead_rank_is_named_at_once() -> None:
    run = start_ranks(RANKS, die, timeout_s=60)
    assert not run.timed_out
    assert run.exit_codes == [1, -signal.SIGKILL, 1, 1], run.describe()
    for rank in (0, 2):
        assert "did not come from rank 1: " in run.logs[rank], run.describe()


def die() -> None:
    import torch.distributed as dist

    original = toy.forward_step

    def forward_step(iterator: Any, model: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(iterator, model)

    toy.forward_step = forward_step
    train("dead")


def note_evaluations(argv: list[str]) -> set[str]:
    """Train as one rank of either role; return what it reports at evaluations."""
    from megatron_ext.config import active
    from megatron_ext.disaggregation import step

    reported = set()

    def reporting(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            [session] = active.required().observers
            reported.add(session.state.activity)  # type: ignore[attr-defined]
            return exchange(*args)

        return noting

    for name in ("send_evaluation", "receive_evaluation"):
        setattr(step, name, reporting(getattr(step, name)))
    train_here("gpt", argv)
    return reported


@pytest.mark.usefixtures("a_training_loop")
def test_neither_role_is_watched_between_its_steps() -> None:
    flags = GPT.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 2")
    argv = f"{flags}--forward-backward-disaggregating --hang-timeout 60".split()
    assert run_ranks(2, note_evaluations, argv) == [{OUTSIDE}] * 2
