"""What ranks recorded is read, and two runs are held against each other to the last bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import DataError
from megatron_ext.tools.compare.run_records import (
    RunRecord,
    Step,
    _mean,
    deviations,
    read,
)
from tests.tools.compare.records import LOSSES, write


def test_the_ranks_of_a_run_are_joined(tmp_path: Path) -> None:
    record = read(write(tmp_path))
    assert [step.losses["lm loss"] for step in record.steps] == list(LOSSES)
    assert record.memory_bytes == 2 << 30
    assert record.tokens == 8 * 32
    assert record.num_ranks == 2
    assert record.durations_s == [0.1, 0.1], "three steps warm up"
    assert record.notes == []


def test_a_line_that_was_cut_off_and_a_rank_without_steps_do_not_count(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    record = tmp_path / "rank-0.jsonl"
    record.write_text(record.read_text()[:-5])
    (tmp_path / "rank-1.jsonl").write_text("")
    joined = read(tmp_path)
    assert len(joined.steps) == len(LOSSES) - 1
    assert joined.gap == "1 of 2 ranks left a record"
    assert joined.notes == [joined.gap]


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    write(tmp_path, changes={1: {"gradient_norm": 7.0}})
    with pytest.raises(
        DataError, match="ranks disagree about the gradient norm of iteration 5"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration": 6}, "the number of an iteration: 5 and 6"),
        ({"skipped": True}, "only some of the ranks skipped iteration 5"),
    ],
)
def test_ranks_that_train_other_steps_are_an_error(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write(tmp_path, changes={1: change})
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_ranks_without_an_optimizer_do_not_say_whether_a_step_was_skipped(
    tmp_path: Path,
) -> None:
    """The forward ranks of a disaggregated job, which come first."""
    write(tmp_path, changes={0: {"skipped": None}, 1: {"skipped": True}})
    assert read(tmp_path).steps[-1].skipped


def test_a_schedule_that_only_one_rank_runs_is_named(tmp_path: Path) -> None:
    write(tmp_path, schedules=["zb-v"] * 5, changes={1: {"schedule": "1f1b"}})
    record = read(tmp_path)
    assert record.substitute("zb-v", is_carried=False) == (
        "1f1b ran instead of zb-v in 1 of 5 steps, first in iteration 5"
    )


def test_a_loss_that_replicas_do_not_average_is_averaged(tmp_path: Path) -> None:
    """Otherwise, a wrong loss on all replicas but the last one would not be seen."""
    record = read(write(tmp_path, changes={0: {"losses": {"lm loss": 9.0}}}))
    assert record.steps[-1].losses == {"lm loss": (LOSSES[-1] + 9.0) / 2}


@given(st.floats(allow_nan=False), st.integers(1, 7))
def test_a_loss_that_ranks_share_keeps_its_bits(loss: float, num_ranks: int) -> None:
    assert _mean([loss] * num_ranks) == loss


def test_a_script_without_megatrons_loop_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no step was recorded; compare needs a script"):
        read(tmp_path)


def _record(losses: list[float]) -> RunRecord:
    steps = [
        Step(i, {"lm loss": loss}, 1.0, False, 0.1) for i, loss in enumerate(losses)
    ]
    return RunRecord(steps)


@given(st.lists(st.floats(), min_size=1, max_size=8), st.data())
def test_a_changed_number_is_seen_and_nothing_else(
    losses: list[float], data: st.DataObject
) -> None:
    same = deviations(_record(losses), _record(losses))
    assert same.are_none
    place = data.draw(st.integers(0, len(losses) - 1))
    changed = list(losses)
    changed[place] = math.nextafter(losses[place], math.inf)
    if math.isnan(losses[place]) or changed[place] == losses[place]:
        changed[place] = 0.5
    difference = deviations(_record(losses), _record(changed))
    assert difference.loss is not None
    assert difference.loss.iteration == difference.first_iteration == place
    assert difference.norm is None


def test_an_iteration_that_only_one_run_skips_is_a_difference() -> None:
    skipping = RunRecord([Step(1, {"lm loss": 2.0}, 1.0, True, 0.1)])
    difference = deviations(
        RunRecord([Step(1, {"lm loss": 2.0}, 1.0, False, 0.1)]), skipping
    )
    assert difference.skipped == 1
    assert not difference.are_none


def _without_norms(rates: list[float], norm: float | None = None) -> RunRecord:
    steps = []
    for number, rate in enumerate(rates):
        steps.append(Step(number, {"lm loss": 2.0}, norm, False, 0.1, rate))
    return RunRecord(steps)


@pytest.mark.parametrize("norm", [None, 0.0])
@pytest.mark.parametrize("rates", [[1e-3], [0.0, 0.0, 1e-3]], ids=["one", "last"])
def test_an_update_without_a_later_loss_proves_nothing(
    rates: list[float], norm: float | None
) -> None:
    """The loss of a step precedes its update, so with `--clip-grad 0`, no gradient is compared."""
    record = _without_norms(rates, norm)
    difference = deviations(record, record)
    assert difference.num_gradients == 0
    assert difference.gap == (
        "no gradient norm was recorded, and no loss after a weight update, so no gradient was "
        "compared; train at least 2 steps, or set --clip-grad"
    )


@pytest.mark.parametrize(
    ("record", "num_gradients"),
    [
        (_without_norms([1e-3, 1e-3, 1e-3]), 2),
        (_without_norms([0.0, 1e-3, 0.0]), 1),
        (_without_norms([1e-3], norm=1.5), 1),
    ],
    ids=["losses", "one update", "norm"],
)
def test_an_update_is_compared_by_a_later_loss_or_by_its_norm(
    record: RunRecord, num_gradients: int
) -> None:
    difference = deviations(record, record)
    assert (difference.num_gradients, difference.gap) == (num_gradients, "")
