"""A process that dies ends the job of both roles, and everybody says which one it was."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ScheduleError
from tests.ranks import run_ranks, start_ranks, train_here
from tests.runtime.capture import GPT, PP2

FBD = "--forward-backward-disaggregating --eval-iters 2 --eval-interval 1 "


def killed(argv: list[str], victim: int, when: str) -> str:
    """Train as one rank; the victim ends in the middle of its second step, or an evaluation."""
    from megatron_ext.disaggregation import step, worlds
    from megatron_ext.errors import MegatronExtError
    from megatron_ext.transport.native_transport import NativeTransport

    rank = int(os.environ["RANK"])
    if rank == victim:
        owner: Any
        owner, name = (NativeTransport, "isend") if when == "step" else (worlds, "beat")
        original = getattr(owner, name)
        calls: list[Any] = []

        def dying(*args: object, **kwargs: object) -> object:
            if not (when == "step" and args[-1].kind == "W"):  # type: ignore[attr-defined]
                calls.append(args)
            if len(calls) == 6 or when != "step":
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, dying)
        step.beat = worlds.beat  # type: ignore[attr-defined]
    try:
        train_here("gpt", argv)
    except MegatronExtError as error:
        return str(error)
    except (
        RuntimeError
    ) as error:  # of torch.distributed, where forward ranks evaluate together
        return f"torch: {error}"
    return ""


@pytest.mark.parametrize(
    ("victim", "when", "witnesses"),
    [(0, "step", [1, 2, 3]), (3, "step", [0, 1, 2]), (2, "evaluation", [1, 3])],
)
def test_a_killed_process_is_named(
    victim: int, when: str, witnesses: list[int]
) -> None:
    """Ranks 0 and 2 run forwards, 1 and 3 backwards; all others end, too."""
    run = start_ranks(4, killed, (GPT + PP2 + FBD).split(), victim, when)
    expected = [0] * 4
    expected[victim] = -signal.SIGKILL
    assert run.exit_codes == expected, run.describe()
    named = rf"rank {victim} on host \S+ \(wire shm\) died"
    for rank in witnesses:
        told = named
        if {rank, victim} == {0, 2}:
            # Before an evaluation, Megatron's loop has a barrier of the forward ranks.
            told += "|^torch: .*Connection (closed|reset) by peer"
        assert re.search(told, run.values[rank]), (rank, run.values[rank])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_roles_end_where_there_is_no_checkpoint(
    tmp_path: Path, num_ranks: int
) -> None:
    """Megatron's own exit code for it is 0, which no launcher takes for a failure."""
    loading = f"--load {tmp_path} --exit-on-missing-checkpoint "
    run = start_ranks(
        num_ranks, train_here, "gpt", (GPT + FBD + loading).split(), timeout_s=60
    )
    assert run.exit_codes == [0] * num_ranks, run.describe()
    told = "".join(run.logs)
    assert re.search(
        r"backward rank \d .* stopped the training with exit code 0; forward ranks exit",
        told,
    )


def declaring(argv: list[str]) -> str:
    """Train as one rank of a model whose stages send trees."""
    from megatron.core.models.gpt import GPTModel

    from megatron_ext import routes
    from megatron_ext.errors import ScheduleError

    build = GPTModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        routes.declare(self, boundary="fixed")

    setattr(GPTModel, "__init__", init)  # noqa: B010
    try:
        train_here("gpt", argv)
    except ScheduleError as error:
        return str(error)
    return ""


def test_trees_are_refused_by_every_rank() -> None:
    for message in run_ranks(4, declaring, (GPT + PP2 + FBD).split()):
        assert (
            "a single tensor [s, b, h]; remove --forward-backward-disaggregating"
            in message
        )


def test_shapes_that_a_program_adjusts_are_refused() -> None:
    from megatron_ext.disaggregation.step import forward_backward

    with pytest.raises(ScheduleError, match="remove --forward-backward-disaggregating"):
        forward_backward(
            print, adjust_tensor_shapes_fn=lambda received, sent: (received, sent)
        )
