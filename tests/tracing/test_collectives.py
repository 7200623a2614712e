"""Nobody waits for other ranks without having been asked to, and least of all on the way out."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import _run_script, losses, run_ranks, start_ranks
from tests.runtime.capture import GPT, PP2

ZB = f"{GPT}{PP2}--pipeline-schedule zb-h1 "
_COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast")


def run_and_note_callers(argv: list[str]) -> set[str]:
    """Train; return the modules that called collectives after the first step."""
    import torch.distributed as dist

    from megatron_ext.runtime import runtime

    callers: set[str] = set()

    def noted(call: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.totals()[0].steps:
            callers.add(sys._getframe(1).f_globals["__name__"])
        return call(*args, **kwargs)

    for name in _COLLECTIVES:
        setattr(dist, name, partial(noted, getattr(dist, name)))
    _run_script("pretrain_gpt.py", argv)
    return callers


@pytest.mark.parametrize("asked", [False, True])
def test_log_lines_reduce_only_where_somebody_gets_the_numbers(
    tmp_path: Path, asked: bool
) -> None:
    flags = ZB + (f"--tensorboard-dir {tmp_path}" if asked else "")
    for callers in run_ranks(2, run_and_note_callers, flags.split()):
        assert ("megatron_ext.tracing.scalars" in callers) == asked
        assert any(name.startswith("megatron.") for name in callers), "none is noted"


def leave_alone(argv: list[str]) -> None:
    """Train with upstream's script; rank 1 ends after its second step, by itself."""
    import torch.distributed as dist
    from megatron.training import training

    step = training.train_step
    steps = []

    def last(*args: Any, **kwargs: Any) -> Any:
        steps.append(step(*args, **kwargs))
        if len(steps) == 2 and dist.get_rank() == 1:
            raise SystemExit(7)
        return steps[-1]

    training.train_step = last
    _run_script("pretrain_gpt.py", argv)


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_a_rank_that_exits_alone_waits_for_nobody() -> None:
    run = start_ranks(2, leave_alone, ZB.split())
    assert run.first_failed == 1, run.describe()
    assert run.exit_codes[1] == 7, run.describe()


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_the_end_by_an_interval_is_told_by_the_first_rank() -> None:
    argv = f"{ZB}--exit-interval 2".split()
    run = start_ranks(2, _run_script, "pretrain_gpt.py", argv)
    assert run.exit_codes == [0, 0], run.describe()
    assert len(losses(run.logs)) == 2
    assert "measured over 2 steps on this rank: " in run.logs[0]
