"""Models with trees and routes, forwards and backwards on ranks of their own: one stage's bits."""

from __future__ import annotations

import sys
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.upstream import releases
from tests.disaggregation.test_training import FBD, MERGED, assert_equal, run_role, together
from tests.examples.test_boundaries import MODELS
from tests.ranks import run_ranks, start_ranks
from tests.runtime.capture import GPT, PP2, PP4, Captured
from tests.tiers import first_quick

pytestmark = pytest.mark.skipif(
    releases.has_training(), reason="the models are put into the embedded trainer, of 0.16 alone"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "boundaries"
FLAGS = GPT.replace("--eval-iters 0", "--eval-iters 2 --eval-interval 2") + (
    "--num-layers 16 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 2 --global-batch-size 16 --clip-grad 0 "
)
Told = tuple[tuple[str, Captured], list[dict[str, float]]]
"""Role and what it computed, and the losses of evaluations."""


def run_model(model: str, argv: list[str]) -> Told:
    """Train a model of the examples with the embedded trainer, as one rank."""
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.training import main as trainer
    from megatron_ext.training import model as building
    from megatron_ext.training.data import Iterators

    evaluated = []

    def build(_args: Any, config: Any, **_shape: Any) -> Any:
        from models import MODELS  # type: ignore[import-not-found]

        rank = parallel_state.get_pipeline_model_parallel_rank()
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        stage = MODELS[model](config, rank, ranks)
        stage.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return stage

    def loss_of(loss: torch.Tensor) -> Any:
        report = torch.stack([loss.detach(), torch.ones(())])
        return loss, torch.ones((), dtype=torch.int), {"lm loss": report}

    def step(samples: Any, chunk: Any) -> Any:
        return chunk(next(samples)), loss_of

    def iterators(args: Any, *_: Any) -> Iterators:
        from stages import sample  # type: ignore[import-not-found]

        args.do_train, args.do_valid, args.do_test = True, True, False
        return Iterators(map(sample, count()), map(sample, count(1000)), None)

    class Reporter(trainer.Reporter):
        def evaluation(self, label: str, iteration: int, losses: dict[str, float]) -> None:
            evaluated.append(losses)

    building._build_gpt = build
    trainer.forward_step = lambda *_: step  # type: ignore[assignment]
    trainer.build_iterators = iterators  # type: ignore[assignment]
    trainer.Reporter = Reporter  # type: ignore[misc]
    return run_role(argv), evaluated


def train(ranks: int, model: str, flags: str) -> tuple[Captured, list[dict[str, float]]]:
    """Return what the backward ranks computed together, and the losses of evaluations."""
    told = run_ranks(ranks, run_model, model, flags.split(), timeout_s=240)
    (evaluated,) = {str(said): said for (role, _), said in told if role == "backward"}.values()
    return together([mine for mine, _ in told])[0], evaluated


@cache
def alone(model: str) -> tuple[Captured, list[dict[str, float]]]:
    return train(1, model, FLAGS)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_quick([(4, PP2), (8, PP4), (4, PP2 + "--pipeline-transport tcp ")]),
)
@pytest.mark.parametrize("model", MODELS)
def test_as_in_one_stage(model: str, ranks: int, flags: str) -> None:
    ours, evaluated = train(ranks, model, FLAGS + flags + FBD)
    theirs, expected = alone(model)
    assert_equal(ours, theirs)
    assert len(theirs.gradients) == 3
    assert evaluated == expected
    assert len(expected) == 2, "between steps, and at the end"


TP2 = "--tensor-model-parallel-size 2 "


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_beside_sequence_parallelism(model: str) -> None:
    flags = FLAGS + TP2 + "--sequence-parallel "
    ours, evaluated = train(8, model, flags + PP2 + FBD)
    theirs, expected = train(2, model, flags)
    assert_equal(ours, theirs)
    assert evaluated == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hyper-connections", "vision-language"])
def test_one_forward_process_for_several_tensor_parallel_ranks(model: str) -> None:
    ours, evaluated = train(6, model, FLAGS + TP2 + PP2 + MERGED)
    theirs, expected = train(2, model, FLAGS + TP2)
    for mine, alone in zip([*ours.losses, *evaluated], [*theirs.losses, *expected], strict=True):
        assert mine == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (
            4,
            PP2 + FBD + "--fbd-activations ship --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1 ",
            "use --fbd-activations recompute",
        ),
        (6, PP2 + TP2 + "--sequence-parallel " + MERGED, "cannot divide trees along the sequence"),
    ],
)
def test_what_roles_cannot_exchange_is_refused(ranks: int, flags: str, message: str) -> None:
    run = start_ranks(ranks, run_model, "hyper-connections", (FLAGS + flags).split(), timeout_s=120)
    assert not run.timed_out, run.describe()
    assert all(run.exit_codes)
    assert all(message in log for log in run.logs), run.describe()
