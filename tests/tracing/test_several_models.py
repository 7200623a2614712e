"""Digests of programs that run several models and have their own optimizers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tools.compare.folders import _text
from megatron_ext.tools.compare.locate import Comparison, compare
from megatron_ext.tracing.digest_files import VARIABLE, read_folder
from tests.ranks import run_ranks, start_ranks

NUM_STEPS = 2
NUM_MICROBATCHES = 2
RATE, OTHER_RATE = 1e-3, 5e-2

Events = tuple[str, ...]
"""What an iteration does: `train MODEL`, `update MODEL`, `evaluate MODEL`, `reset MODEL` (to other
weights), `begin again` (at iteration 0), or `report`, as Megatron's optimizers do at their end."""


def _record(
    runs: Sequence[tuple[str, dict[str, float]]],
    events: Events,
    last_events: Events,
    counts: bool,
) -> None:
    """Record several runs, as one rank; in the last iteration, models have their own rates."""
    from tests.runtime import toy

    toy.start(1)
    for folder, last_rates in runs:
        _record_run(folder, events, last_rates, last_events, counts)


def _record_run(
    folder: str,
    events: Events,
    last_rates: dict[str, float],
    last_events: Events,
    counts: bool,
) -> None:
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_ext
    from megatron_ext.config import active
    from tests.pipelines import use
    from tests.runtime import toy

    os.environ[VARIABLE] = folder
    use(None)
    models: dict[str, Any] = {}
    for number, name in enumerate(("actor", "critic", "frozen")):
        [models[name]] = toy.chunks(toy.config(), [0])
        # The models differ, but all are the pipeline's first stage.
        models[name].weight.data *= 1 + 0.1 * number
    models["frozen"].weight.requires_grad_(False)

    def call(model: Any, *, forward_only: bool) -> None:
        get_forward_backward_func()(
            forward_step_func=toy.forward_step,
            data_iterator=toy.samples(NUM_MICROBATCHES),
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=toy.LENGTH,
            micro_batch_size=toy.BATCH,
            forward_only=forward_only,
        )

    for iteration in range(NUM_STEPS):
        is_last = iteration == NUM_STEPS - 1
        if counts:
            megatron_ext.begin_iteration(iteration)
        for event in [*events, *(last_events if is_last else ())]:
            kind, _, name = event.partition(" ")
            model = models.get(name)
            if kind == "train":
                model.weight.grad = None
                call(model, forward_only=False)
            elif kind == "evaluate":
                with torch.no_grad():
                    call(model, forward_only=True)
            elif kind == "report":
                for observer in active.required().observers:
                    observer.begin_collective("optimizer")
                    observer.end_collective("optimizer")
            elif kind == "begin":
                megatron_ext.begin_iteration(0)
            elif kind == "reset":
                model.weight.data.fill_(0.5)
            else:
                rate = last_rates.get(name, RATE) if is_last else RATE
                with torch.no_grad():
                    model.weight -= rate * model.weight.grad
    megatron_ext.deconfigure()
    del os.environ[VARIABLE]


def _compared(
    folder: Path,
    events: Events,
    changed: str,
    last_events: Events = (),
    counts: bool = False,
) -> tuple[Comparison, Comparison]:
    """Compare a run with itself, and with a run in which a model's last update is larger."""
    folders = [folder / name for name in ("one", "same", "other")]
    rates = ({}, {}, {changed: OTHER_RATE})
    runs = [(str(path), rate) for path, rate in zip(folders, rates, strict=True)]
    run_ranks(1, _record, runs, events, last_events, counts)
    return compare(folders[0], folders[1]), compare(folders[0], folders[2])


_ACTOR = "train actor", "update actor"
_CRITIC = "train critic", "update critic"
_TOGETHER = "train actor", "train critic", "update actor", "update critic"


@pytest.mark.parametrize(
    ("events", "changed", "step", "weight"),
    [
        (_ACTOR, "actor", 2, "stage 0.weight"),
        ((*_ACTOR, "evaluate frozen"), "actor", 2, "stage 0.weight"),
        (("train actor", "evaluate frozen", "update actor"), "actor", 2, "stage 0.weight"),
        (("train actor", "evaluate actor", "update actor"), "actor", 2, "stage 0.weight"),
        (("evaluate frozen", *_ACTOR), "actor", 2, "stage 0.weight"),
        ((*_ACTOR, *_CRITIC), "actor", 3, "stage 0.weight"),
        ((*_ACTOR, *_CRITIC), "critic", 4, "model 2.stage 0.weight"),
        (_TOGETHER, "actor", 3, "stage 0.weight"),
        (_TOGETHER, "critic", 4, "model 2.stage 0.weight"),
        ((*_TOGETHER[:3], "report", "update critic", "report"), "actor", 3, "stage 0.weight"),
        ((*_TOGETHER[:3], "report", "update critic", "report"), "critic", 4,
         "model 2.stage 0.weight"),
    ],
    ids=[
        "alone", "reference after the update", "reference before the update",
        "evaluated before the update", "reference first", "actor in turn", "critic in turn",
        "actor together", "critic together", "actor reported", "critic reported",
    ],
)  # fmt: skip
def test_another_last_update_is_a_difference(
    events: Events, changed: str, step: int, weight: str, tmp_path: Path
) -> None:
    """Only the weights after the last step differ."""
    same, other = _compared(tmp_path, events, changed)
    assert (same.difference, same.gap, same.notes) == (None, "", ())
    assert other.difference is not None
    found = other.difference
    assert (found.iteration, found.kind, found.name) == (step, "weights", weight)


def test_weights_that_are_replaced_after_an_evaluation_are_compared(
    tmp_path: Path,
) -> None:
    """For example, the program loads its best checkpoint at the end."""
    events = (*_ACTOR, "evaluate actor")
    same, other = _compared(tmp_path, events, "actor", last_events=("reset actor",))
    assert (same.difference, same.gap) == (None, "")
    assert other.difference is not None
    assert "stage 0.weight (first of two readings)" in other.difference.sentence()


def test_weights_are_recorded_once_if_an_evaluation_does_not_change_them(
    tmp_path: Path,
) -> None:
    events = (*_ACTOR, "evaluate frozen", "evaluate actor")
    run_ranks(1, _record, [(str(tmp_path / "one"), {})], events, (), False)
    [file] = read_folder(tmp_path / "one")
    weights = [record for record in file.steps[2] if record.kind == "weights"]
    assert [record.module for record in weights] == ["stage 0.weight"]


def test_models_that_train_in_turn_are_named(tmp_path: Path) -> None:
    runs = [(str(tmp_path / "one"), {})]
    run = start_ranks(1, _record, runs, (*_ACTOR, *_CRITIC), (), False)
    assert run.exit_codes == [0]
    said = "the names of tensors in model 2 begin with 'model 2.'"
    assert run.logs[0].count(said) == 1
    [file] = read_folder(tmp_path / "one")
    for step, is_second in ((1, False), (2, True), (3, False), (4, True)):
        for record in file.steps[step]:
            assert record.module.startswith("model 2.") == is_second


@pytest.mark.parametrize("reports", [False, True])
def test_models_whose_steps_have_the_same_number_are_unproven(
    reports: bool, tmp_path: Path
) -> None:
    """One model's steps are recorded, and those of the other are not."""
    events: Events = (*_ACTOR, *_CRITIC)
    if reports:
        events = (*_ACTOR, "report", *_CRITIC, "report")
    same, other = _compared(tmp_path, events, "critic", counts=True)
    for comparison in (same, other):
        assert comparison.difference is None
        assert "step 1 trained several models" in comparison.gap
        assert "call megatron_ext.begin_iteration with a new number" in comparison.gap
    assert "equality is unproven, because" in _text(same)
    [file] = read_folder(tmp_path / "one")
    assert sorted(file.steps) == [0, 1, 2]
    for records in file.steps.values():
        assert not any(record.module.startswith("model 2.") for record in records)


def test_models_that_train_one_after_the_other_with_the_same_numbers_are_unproven(
    tmp_path: Path,
) -> None:
    """Otherwise, the second model's steps would replace those of the first."""
    runs = [(str(tmp_path / name), {}) for name in ("one", "same")]
    run_ranks(1, _record, runs, _ACTOR, ("begin again", *_CRITIC), True)
    comparison = compare(tmp_path / "one", tmp_path / "same")
    assert "step 1 trained several models" in comparison.gap


def test_the_model_that_is_recorded_still_differs(tmp_path: Path) -> None:
    _, other = _compared(tmp_path, _TOGETHER, "actor", counts=True)
    assert other.difference is not None
    assert other.difference.name == "stage 0.weight"
