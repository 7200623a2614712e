"""Trainings that fail at random points end everywhere, say why, and leave nothing behind.

A fault strikes one rank or all: in a layer's forward or backward, in a hook, in the data or in the
optimizer, over every transport. Ranks end as programs do, by the interpreter's exit with all its
hooks: a thread that outlives it would abort the process.

    FAILING_TRAININGS=0:200 pytest tests/hangs/test_failing_trainings.py    seeds of the trainings

200 take 20 minutes on two cores.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.ranks import start_ranks
from tests.upstream_script.runs import GPT

pytestmark = pytest.mark.skipif(
    not releases.has_training() and upstream.find_tree() is None,
    reason="megatron-core 0.16 needs MEGATRON_LM_PATH for megatron.training",
)

_PLACES = ("forward", "backward", "hook", "data", "optimizer")
_SCHEDULES = {
    2: ("1f1b", "zb-h1", "zb-v", "interleaved", "1f1b --use-dpp", ""),
    4: ("zb-v", "dualpipe-v", "bitpipe", "zb-h1 --use-dpp"),
}
_TRANSPORTS = ("shm", "tcp", "torch")
_QUICK = (0, 8, 18, 20, 22)
"""Seeds that together have every place and transport, two and four ranks, one and all that fail."""


class InjectedError(Exception):
    """The fault."""


@dataclass(frozen=True)
class Training:
    """One training and its fault, drawn by a seed."""

    seed: int
    ranks: int
    flags: str
    place: str
    rank: int | None
    """The rank that fails; None: all of them."""
    call: int
    """The call of the place that fails, from 1."""

    @classmethod
    def drawn(cls, seed: int) -> Training:
        """Draw a training."""
        draw = random.Random(seed)
        ranks = draw.choice([2, 2, 4])
        schedule = draw.choice(_SCHEDULES[ranks])
        transport = draw.choice(_TRANSPORTS)
        if transport == "torch" and ("--use-dpp" in schedule or not schedule):
            transport = (
                "auto" if schedule else "shm"
            )  # not for dpp, and nothing of ours
        flags = (
            f"--pipeline-model-parallel-size {ranks} --pipeline-transport {transport}"
        )
        if schedule:
            flags += f" --pipeline-schedule {schedule}"
        place = draw.choice(_PLACES)
        return cls(
            seed,
            ranks,
            f"{GPT}--num-layers 8 --train-iters 3 {flags}",
            place,
            # Only the ends of a pipeline read data, and the first rank has one in any placement.
            0 if place == "data" else draw.choice([*range(ranks), None]),
            draw.randint(1, 12),
        )


def _train(training: Training) -> None:
    from tests.ranks import _run_script

    if training.rank in (None, int(os.environ["RANK"])):
        has_schedule = "--pipeline-schedule" in training.flags
        _inject(training.place, training.call, has_schedule=has_schedule)
    _run_script("pretrain_gpt.py", training.flags.split())


def _inject(place: str, nth: int, *, has_schedule: bool) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    calls = 0

    def strike(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise InjectedError(f"call {nth} of {place}")

    def before(owner: type, name: str, every: int = 1) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            strike()
            return original(*args, **kwargs)

        setattr(owner, name, struck)

    if place == "forward":
        before(TransformerLayer, "forward")
    elif place == "data":
        before(GPTDataset, "__getitem__")
    elif place == "backward" and not has_schedule:
        forward = TransformerLayer.forward

        # A backward hook of a module makes its output a view, which Megatron's own steps refuse.
        def followed(self: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output[0].register_hook(strike)
            return output

        TransformerLayer.forward = followed
    elif place == "optimizer":
        nth = 1 + nth % 3
        before(FP32Optimizer, "prepare_grads")
    else:
        made = TransformerLayer.__init__

        def hooked(self: TransformerLayer, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            if place == "hook":
                self.register_forward_hook(strike)
            else:
                self.register_full_backward_pre_hook(strike)

        TransformerLayer.__init__ = hooked


def _seeds() -> list[Any]:
    chosen = os.environ.get("FAILING_TRAININGS")
    first, _, end = (chosen or "0:24").partition(":")
    return [
        seed if chosen or seed in _QUICK else pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(int(first), int(end))
    ]


@pytest.mark.parametrize("seed", _seeds())
def test_a_failing_training_ends_everywhere(seed: int, tmp_path: Path) -> None:
    training = Training.drawn(seed)
    ended = start_ranks(
        training.ranks,
        _train,
        training,
        timeout_s=120,
        env={"TMPDIR": str(tmp_path)},
        finalizes=True,
    )
    told = f"{training}\n{ended.describe()}"
    assert not ended.timed_out, told
    assert set(ended.exit_codes) <= {1, 2}, f"{ended.exit_codes} {told}"
    faults = ["InjectedError: call" in log for log in ended.logs]
    assert any(faults), told
    others = [
        log for rank, log in enumerate(ended.logs) if training.rank not in (None, rank)
    ]
    for log in others:
        assert "Traceback" not in log, f"{log[-4000:]}\n{told}"
    # Equal lines of several ranks are shown once.
    assert not others or any("megatron_ext: error: " in log for log in others), told
    assert ended.num_orphans == 0, told
    assert list(tmp_path.iterdir()) == [], told


def test_the_quick_ones_have_every_place_and_transport() -> None:
    drawn = [Training.drawn(seed) for seed in _QUICK]
    assert {training.place for training in drawn} == set(_PLACES)
    flags = " ".join(training.flags for training in drawn)
    assert all(f"--pipeline-transport {name}" in flags for name in _TRANSPORTS)
    assert {training.ranks for training in drawn} == {2, 4}
    assert {None, 0} < {training.rank for training in drawn}
