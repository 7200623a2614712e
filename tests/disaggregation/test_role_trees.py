"""Models with trees and routes, forwards and backwards on ranks of their own: one stage's bits."""

from __future__ import annotations

import sys
from functools import cache, wraps
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.disaggregation.test_training import FBD, MERGED, assert_equal, run_role, together
from tests.examples.test_boundaries import MODELS
from tests.ranks import run_ranks, start_ranks
from tests.runtime import capture
from tests.runtime.capture import GPT, PP2, PP4, Captured

pytestmark = pytest.mark.usefixtures("a_training_loop")

EXAMPLE = Path(__file__).parents[2] / "examples" / "boundaries"
FLAGS = GPT.replace("--eval-iters 0", "--eval-iters 2 --eval-interval 2") + (
    "--num-layers 16 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 2 --global-batch-size 16 --clip-grad 0 "
)
Told = tuple[tuple[str, Captured], list[dict[str, float]]]
"""Role and what it computed, and the losses of evaluations."""


def run_model(model: str, argv: list[str]) -> Told:
    """Train a model of the examples with Megatron's loop, as one rank."""
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.training import arguments, get_args, training

    evaluated: list[dict[str, float]] = []
    evaluate = training.evaluate

    @wraps(evaluate)
    def evaluating(*args: Any, **kwargs: Any) -> Any:
        losses, *rest = evaluate(*args, **kwargs)
        evaluated.append({name: float(loss) for name, loss in losses.items()})
        return losses, *rest

    def build(**_shape: Any) -> Any:
        from models import MODELS  # type: ignore[import-not-found]

        rank = parallel_state.get_pipeline_model_parallel_rank()
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        config = arguments.core_transformer_config_from_args(get_args())
        stage = MODELS[model](config, rank, ranks)
        stage.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return stage

    def loss_of(loss: torch.Tensor) -> Any:
        report = torch.stack([loss.detach(), torch.ones(())])
        return loss, torch.ones((), dtype=torch.int), {"lm loss": report}

    def step(samples: Any, chunk: Any) -> Any:
        return chunk(next(samples)), loss_of

    def datasets(_samples: Any, vp_stage: int | None = None) -> Any:
        from stages import sample  # type: ignore[import-not-found]

        return map(sample, count()), map(sample, count(1000)), None

    def pretrain(_model: str, words: list[str]) -> None:
        sys.argv = ["pretrain.py", *words, "--dataloader-type", "external"]
        training.evaluate = evaluating
        kind = ModelType.encoder_or_decoder
        if not hasattr(arguments, "parse_and_validate_args"):
            training.pretrain(datasets, build, kind, step)
            return
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        container = pretrain_cfg_container_from_args(arguments.parse_and_validate_args())
        providers = {"train_valid_test_dataset_provider": datasets, "model_provider": build}
        training.pretrain(container, model_type=kind, forward_step_func=step, **providers)

    datasets.is_distributed = True  # type: ignore[attr-defined]
    setattr(capture, "train_here", pretrain)  # noqa: B010
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
    [(4, PP2), (8, PP4), (4, PP2 + "--pipeline-transport tcp ")],
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
