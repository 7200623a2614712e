"""Digests of trainings: the same names and the same bits under any cut, order and wire."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tools.compare.locate import compare, locate
from megatron_ext.tracing.digest_files import (
    KINDS,
    MEGATRONS,
    ROUNDING,
    VARIABLE,
    read_folder,
)
from tests.ranks import run_ranks, run_script
from tests.runtime.capture import PP2
from tests.tracing.recorded import Training, train
from tests.training.helpers import MOCK, NO_DROPOUT


def _train_each(*trainings: Training) -> None:
    for training in trainings:
        train(training)


@pytest.mark.short_s(8)
def test_schedules_with_the_same_bits_have_the_same_digests(tmp_path: Path) -> None:
    own = Training(str(tmp_path / "own"))
    zb_h1, zb_v = (
        replace(own, folder=str(tmp_path / n), schedule=n) for n in ("zb-h1", "zb-v")
    )
    run_ranks(2, _train_each, own, zb_h1, zb_v)
    for candidate in (zb_h1, zb_v):
        comparison = compare(tmp_path / "own", Path(candidate.folder))
        assert comparison.difference is None
        assert comparison.gap == ""
        assert comparison.notes == ()
    for training, schedule in ((own, MEGATRONS), (zb_h1, "zb-h1"), (zb_v, "zb-v")):
        for file in read_folder(Path(training.folder)):
            assert file.schedules == {1: schedule, 2: schedule}
    # An action of each table, not of the other's: the two cuts were held against each other.
    actions = {
        record.action
        for file in read_folder(Path(zb_v.folder))
        for records in file.steps.values()
        for record in records
    }
    assert {"3I2", "3W2", "0F3"} <= actions


_FOUR_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bitpipe": ({"num_layers": 8}, {"schedule": "bitpipe", "pipeline_ranks": 4, "num_layers": 8,
                                    "num_microbatches": 8}),
    "overlapped reductions": ({"reduction": {"overlap_grad_reduce": True}},
                              {"reduction": {"overlap_grad_reduce": True}, "schedule": "zb-v"}),
    "one replica": ({}, {"pipeline_ranks": 4, "num_microbatches": 8, "schedule": "1f1b"}),
    "tensor parallel": ({"tensor_ranks": 2}, {"tensor_ranks": 2, "schedule": "zb-v"}),
}  # fmt: skip
"""By name: what the reference has beside two stages, and what the candidate has."""


@pytest.mark.slow
@pytest.mark.parametrize("name", _FOUR_RANKS)
def test_four_ranks_in_other_shapes_have_the_same_digests(
    name: str, tmp_path: Path
) -> None:
    """With another number of replicas, sums over them may differ in their last bits."""
    first, second = _FOUR_RANKS[name]
    own = Training(str(tmp_path / "own"), world_size=4, **first)
    other = Training(**{"folder": str(tmp_path / "other"), "world_size": 4, **second})
    run_ranks(4, _train_each, own, other)
    assert locate(tmp_path / "own", tmp_path / "other") is None


SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce "


@pytest.mark.short_s(20)
@pytest.mark.usefixtures("a_training_loop")
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(2, ""), pytest.param(4, SHARDED, marks=pytest.mark.slow)],
    ids=["two stages", "sharded"],
)
def test_megatrons_own_loop_is_recorded(
    num_ranks: int, flags: str, tmp_path: Path
) -> None:
    """Its optimizer ends a step; evaluations between steps are not recorded."""
    flags += f"{MOCK}{NO_DROPOUT}{PP2}--clip-grad 0 --train-iters 2 --eval-interval 1 "
    for name, schedule in (("own", ""), ("ours", "--pipeline-schedule zb-h1")):
        environment = {VARIABLE: str(tmp_path / name)}
        run_script(
            num_ranks, "pretrain_gpt.py", f"{flags}{schedule}".split(), env=environment
        )
    assert locate(tmp_path / "own", tmp_path / "ours") is None
    for file in read_folder(tmp_path / "ours"):
        assert sorted(file.steps) == [0, 1, 2]
        assert {record.kind for record in file.steps[2]} == set(KINDS)
        assert file.header.schedule == "zb-h1"


def _noisy(chunks: list[Any]) -> AbstractContextManager[Any]:
    from tests.mutations.silent_faults import at_output

    # Rounded to float32, two factors between 1 and 1.01 are hardly ever equal: it has 80,000.
    factor = 1 + random.SystemRandom().random() / 100
    return at_output(2, "mlp", lambda output: output * factor, 1)(chunks)


def _train_twice(first: Training, second: Training) -> None:
    train(first, _noisy)
    train(second, _noisy)


@pytest.mark.short_s(6)
def test_a_run_that_is_not_deterministic_differs_from_itself(tmp_path: Path) -> None:
    first, second = (
        Training(str(tmp_path / name), "zb-v") for name in ("first", "second")
    )
    run_ranks(2, _train_twice, first, second)
    difference = locate(tmp_path / "first", tmp_path / "second")
    assert difference is not None
    assert (difference.iteration, difference.microbatches) == (1, (1,))
    assert (difference.layer, difference.module) == (2, "mlp")
    assert difference.candidate is not None
    assert difference.candidate.action == "2F1"


def _slightly_wrong(chunks: list[Any]) -> AbstractContextManager[Any]:
    from tests.mutations.silent_faults import at_output

    def change(output: Any) -> Any:
        """Change the gradient alone: the value is that of the output."""
        return output + 1e-5 * (output.detach() - output)

    return at_output(2, "mlp", change)(chunks)


def _train_in_orders(
    own: Training, other: Training, wrong: Training, rounded: Training
) -> None:
    import os

    train(own)
    train(other)
    train(wrong, _slightly_wrong)
    os.environ[ROUNDING] = "1"
    train(rounded)


@pytest.mark.short_s(8)
def test_other_sums_stay_within_what_rounding_changes_and_a_fault_does_not(
    tmp_path: Path,
) -> None:
    """The fault is smaller than the stated tolerance."""
    own = Training(str(tmp_path / "own"), pipeline_ranks=1)
    rounded = replace(own, folder=str(tmp_path / "rounded"))
    other = Training(str(tmp_path / "other"), num_microbatches=8)
    wrong = replace(other, folder=str(tmp_path / "wrong"))
    run_ranks(2, _train_in_orders, own, other, wrong, rounded)
    folders = {name: tmp_path / name for name in ("own", "other", "wrong", "rounded")}
    assert (
        compare(folders["own"], folders["other"], folders["rounded"]).difference is None
    )
    assert locate(folders["own"], folders["wrong"]) is None
    difference = compare(
        folders["own"], folders["wrong"], folders["rounded"]
    ).difference
    assert difference is not None
    assert (difference.kind, difference.iteration) == ("backward", 1)
    assert (difference.layer, difference.module) == (2, "mlp")


def _without_the_variable(training: Training) -> tuple[int, int]:
    """Return the hooks of a chunk's modules, and the observers, of a step without recording."""
    import os

    from megatron_ext.config.active import required
    from tests.tracing import recorded

    with recorded.built(training) as (build, chunks):
        del os.environ[VARIABLE]
        recorded.step(training, build, chunks, 0)
        num_hooks = sum(len(module._forward_hooks) for module in chunks[0].modules())
        os.environ[VARIABLE] = ""
        return num_hooks, len(required().observers)


def test_without_the_variable_nothing_is_hooked(tmp_path: Path) -> None:
    training = Training(str(tmp_path / "none"), "zb-h1")
    assert run_ranks(2, _without_the_variable, training) == [(0, 0), (0, 0)]
    assert not (tmp_path / "none").exists()
