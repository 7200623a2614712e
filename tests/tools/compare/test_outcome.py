"""The judgement of a comparison: speed, numbers, the verdict, the exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tools.compare.outcome import (
    DIFFERENT,
    EQUAL,
    FAILED,
    Contender,
    as_json,
    judge,
)
from megatron_ext.tools.compare.recipe import REFERENCE, Candidate
from megatron_ext.tools.compare.run_records import read
from megatron_ext.tools.compare.text import answer_text
from megatron_ext.tools.compare.tolerances import Promise
from tests.tools.compare.records import LOSSES, write

BITS = Promise(0.0, 0.0)
CLOSE = Promise(1e-4, 1e-3, "sums are added up in another order")
ZB_V = Candidate("zb-v", ("--pipeline-schedule", "zb-v"))


def contender(
    folder: Path,
    candidate: Candidate = ZB_V,
    *,
    rounds: tuple[float, ...] = (0.1, 0.1),
    losses: tuple[float, ...] = LOSSES,
    promise: Promise = BITS,
) -> Contender:
    records = []
    for number, step_s in enumerate(rounds):
        folder_of_round = folder / candidate.label / str(number)
        records.append(read(write(folder_of_round, losses, step_s=step_s)))
    return Contender(candidate, promise, records=records)


def own(folder: Path, rounds: tuple[float, ...] = (0.2, 0.2)) -> Contender:
    return contender(folder, Candidate(REFERENCE, ()), rounds=rounds)


def test_a_faster_candidate_with_the_same_bits_is_kept(tmp_path: Path) -> None:
    answer = judge([own(tmp_path), contender(tmp_path)], speed_only=False)
    assert answer.code == EQUAL
    assert answer.keep == ["--pipeline-schedule", "zb-v"]
    assert answer.rows[1].judgement == "equal"
    assert answer.verdict == (
        "zb-v is 2.00 x as fast as Megatron's own, with the same losses and gradient norms to the "
        "last bit over 5 steps."
    )
    shown = answer_text(answer)
    assert "bit-equal" in shown
    assert "2.00 x" in shown
    assert "2,560" in shown, "tokens a second"
    assert "Flags to keep: --pipeline-schedule zb-v" in shown


def test_a_steady_drift_cancels(tmp_path: Path) -> None:
    """Each run takes a step of 10 ms longer than the one before it: own, zb-v, zb-v, own."""
    answer = judge(
        [own(tmp_path, (0.10, 0.13)), contender(tmp_path, rounds=(0.11, 0.12))],
        speed_only=False,
    )
    assert answer.rows[1].speed == pytest.approx(1.0)
    assert answer.keep == [] or "may not be faster" in answer.verdict


def test_a_gain_within_the_noise_is_not_simply_kept(tmp_path: Path) -> None:
    answer = judge(
        [own(tmp_path, (0.10, 0.13)), contender(tmp_path, rounds=(0.10, 0.12))],
        speed_only=False,
    )
    assert "may not be faster than Megatron's own" in answer.verdict
    heading = "Flags to keep if the gain repeats with more --rounds"
    assert f"{heading}: --pipeline-schedule zb-v" in answer_text(answer)


@pytest.mark.parametrize(
    ("promise", "change", "judgement", "code"),
    [
        (BITS, 1e-7, "different", DIFFERENT),
        (CLOSE, 1e-7, "close", EQUAL),
        (CLOSE, 1e-3, "different", DIFFERENT),
        (Promise(None, None, "dropout"), 0.5, "not judged", EQUAL),
    ],
)
def test_numbers_are_held_to_what_both_runs_promise(
    tmp_path: Path, promise: Promise, change: float, judgement: str, code: int
) -> None:
    losses = (*LOSSES[:-1], LOSSES[-1] * (1 + change))
    other = contender(tmp_path, losses=losses, promise=promise)
    answer = judge([own(tmp_path), other], speed_only=False)
    assert answer.rows[1].judgement == judgement
    assert answer.code == code
    assert (answer.keep == []) == (judgement == "different")
    if judgement == "different":
        assert answer.verdict.startswith(
            "zb-v and Megatron's own produced different numbers"
        )
    [difference] = [
        run["loss_difference"]
        for run in as_json(answer, [own(tmp_path), other])["runs"][1:]
    ]
    assert difference["relative"] == pytest.approx(change, rel=1e-2)
    assert difference["iteration"] == 5


def test_a_recipe_that_does_not_repeat_itself_is_no_difference_and_is_said(
    tmp_path: Path,
) -> None:
    reference = own(tmp_path)
    noisy = (*LOSSES[:-1], LOSSES[-1] * 1.001)
    reference.records[1] = read(write(tmp_path / "noisy", noisy))
    other = contender(tmp_path, losses=(*LOSSES[:-1], LOSSES[-1] * 1.0005))
    answer = judge([reference, other], speed_only=False)
    assert answer.rows[1].judgement == "close"
    assert "the recipe is not deterministic" in answer.rows[1].reason
    assert "Megatron's own: two runs with the same flags differ" in answer_text(answer)


@pytest.mark.parametrize("changed_round", [0, 1])
def test_a_candidate_that_does_not_repeat_itself_is_different(
    tmp_path: Path, changed_round: int
) -> None:
    """A race changes the numbers in some of the rounds, while those of the reference are equal."""
    other = contender(tmp_path)
    changed_losses = (*LOSSES[:-1], LOSSES[-1] + 1e-9)
    other.records[changed_round] = read(write(tmp_path / "changed", changed_losses))
    answer = judge([own(tmp_path), other])
    assert answer.code == DIFFERENT
    assert answer.rows[1].judgement == "different"
    assert "zb-v: two runs with the same flags differ" in answer_text(answer)


@pytest.mark.parametrize("last_loss", [float("nan"), 2 * LOSSES[-1]])
def test_a_reference_that_does_not_repeat_itself_at_all_proves_nothing(
    tmp_path: Path, last_loss: float
) -> None:
    reference = own(tmp_path)
    reference.records[1] = read(write(tmp_path / "again", (*LOSSES[:-1], last_loss)))
    other = contender(tmp_path, losses=(*LOSSES[:-1], 1.5 * LOSSES[-1]))
    answer = judge([reference, other])
    assert (answer.rows[1].judgement, answer.code) == ("unproven", FAILED)
    assert "two runs of the reference differ by as much" in answer.verdict


def _with_steps(owner: Contender, **changes: Any) -> Contender:
    """Return the contender with fields of all steps changed."""
    records = []
    for record in owner.records:
        steps = [replace(step, **changes) for step in record.steps]
        records.append(replace(record, steps=steps))
    return replace(owner, records=records)


@pytest.mark.parametrize("promise", [BITS, CLOSE], ids=["exact", "tolerant"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": {"lm loss": float("nan")}}, "lm loss is nan in both runs at iter"),
        ({"gradient_norm": float("inf")}, "gradient norm is inf in both runs at iter"),
        ({"losses": {}}, "the runs recorded no losses"),
        ({"skipped": True}, "the optimizer skipped every step"),
        (
            {"gradient_norm": None, "learning_rate": 0.0},
            "the learning rate is 0 and no gradient norm was recorded",
        ),
    ],
    ids=["nan", "inf", "no losses", "skipped", "no updates"],
)
def test_equal_numbers_that_prove_nothing_are_not_equal(
    tmp_path: Path, changes: dict[str, Any], reason: str, promise: Promise
) -> None:
    other = contender(tmp_path, promise=promise)
    contenders = [_with_steps(owner, **changes) for owner in (own(tmp_path), other)]
    answer = judge(contenders)
    assert answer.code == FAILED
    assert answer.rows[1].judgement == "unproven"
    assert answer.rows[1].reason.startswith(reason)
    assert reason in answer.verdict
    shown = answer_text(answer)
    assert reason in shown
    assert "bit-equal" not in shown
    assert "as fast" not in shown
    assert answer.keep == []
    itself = judge(contenders, against_itself=True)
    assert itself.verdict.startswith("unknown whether the recipe is deterministic: ")


@pytest.mark.parametrize("norm", [None, 0.0])
def test_a_single_step_without_a_norm_proves_nothing(
    tmp_path: Path, norm: float | None
) -> None:
    """For example, the recipe has `--clip-grad 0` and `--train-iters 1`."""
    contenders = []
    for candidate in (Candidate(REFERENCE, ()), ZB_V):
        owner = contender(tmp_path, candidate, losses=LOSSES[:1])
        contenders.append(_with_steps(owner, gradient_norm=norm))
    answer = judge(contenders)
    assert (answer.rows[1].judgement, answer.code) == ("unproven", FAILED)
    assert "so no gradient was compared; train at least 2 steps" in answer.verdict


def test_losses_of_some_steps_prove_nothing(tmp_path: Path) -> None:
    contenders = [own(tmp_path), contender(tmp_path)]
    for owner in contenders:
        for record in owner.records:
            record.steps[3] = replace(record.steps[3], losses={})
    answer = judge(contenders)
    assert answer.rows[1].judgement == "unproven"
    assert answer.rows[1].reason == "the runs recorded no loss at iteration 4"


@pytest.mark.parametrize("position", [0, 1])
def test_a_rank_without_a_record_proves_nothing(tmp_path: Path, position: int) -> None:
    contenders = [own(tmp_path), contender(tmp_path)]
    folder = write(tmp_path / "incomplete")
    (folder / "rank-0.jsonl").unlink()
    contenders[position].records[1] = read(folder)
    answer = judge(contenders)
    assert answer.rows[1].judgement == "unproven"
    assert answer.rows[1].reason == "1 of 2 ranks left a record"


def test_a_norm_that_does_not_repeat_excuses_no_loss(tmp_path: Path) -> None:
    reference = own(tmp_path)
    reference.records[1] = read(write(tmp_path / "again", norm=1.501))
    other = contender(tmp_path, losses=(*LOSSES[:-1], LOSSES[-1] * 1.0005))
    assert judge([reference, other]).rows[1].judgement == "different"


def test_rounds_of_the_reference_with_other_steps_prove_nothing(tmp_path: Path) -> None:
    reference = own(tmp_path)
    reference.records[1] = read(write(tmp_path / "again", LOSSES[:-1]))
    answer = judge([reference, contender(tmp_path)])
    assert answer.rows[1].judgement == "unproven"
    assert "trained different steps" in answer.rows[1].reason


def test_warm_up_steps_are_no_step_time(tmp_path: Path) -> None:
    """The recipe ends before the first measured step."""
    other = contender(tmp_path, losses=LOSSES[:3], rounds=(0.1,))
    reference = contender(tmp_path, Candidate(REFERENCE, ()), losses=LOSSES[:3])
    answer = judge([reference, other])
    assert answer.rows[1].judgement == "equal"
    assert answer.rows[1].step_s is None
    assert answer.keep == []
    shown = answer_text(answer)
    assert "zb-v: no step time: it trained 3 steps, and the first 3 are not" in shown


def test_departures_and_chosen_wires_are_said_once(tmp_path: Path) -> None:
    other = replace(contender(tmp_path, rounds=()), chooses_wires=True)
    for number in range(2):
        folder = write(
            tmp_path / str(number),
            wires=["shm", "tcp"],
            departures=["weight gradient computed in I instead of W: a"],
            num_slices=[2, 1, 2, 1, 2],
        )
        other.records.append(read(folder))
    answer = judge([own(tmp_path), other])
    assert answer.rows[1].judgement == "equal"
    notes = [
        "weight gradient computed in I instead of W: a",
        "in 2 of 5 steps, no micro-batch was long enough to be cut into slices",
        "messages over shm and tcp",
    ]
    assert answer.rows[1].notes == notes
    assert as_json(answer, [own(tmp_path), other])["runs"][1]["notes"] == notes


@pytest.mark.parametrize("norm", [None, 0.0])
def test_a_norm_that_was_not_computed_is_not_called_equal(
    tmp_path: Path, norm: float | None
) -> None:
    contenders = []
    for owner in (own(tmp_path), contender(tmp_path)):
        contenders.append(_with_steps(owner, gradient_norm=norm))
    answer = judge(contenders)
    assert answer.code == EQUAL
    assert answer.verdict.endswith("with the same losses to the last bit over 5 steps.")
    assert answer_text(answer).count("bit-equal") == 1


def test_other_iterations_are_different(tmp_path: Path) -> None:
    """For example, only the candidate resumes from a later checkpoint."""
    other = contender(tmp_path)
    for record in other.records:
        for index, step in enumerate(record.steps):
            record.steps[index] = replace(step, iteration=100 + step.iteration)
    answer = judge([own(tmp_path), other])
    assert answer.code == DIFFERENT
    assert answer.rows[1].reason == (
        "it trained iterations 101 to 105, but the reference trained 1 to 5"
    )


def test_json_has_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    diverged = contender(tmp_path, losses=(*LOSSES[:-1], float("nan")))
    reference = own(tmp_path)
    answer = judge([reference, diverged], speed_only=False)
    text = json.dumps(as_json(answer, [reference, diverged]), allow_nan=False)
    assert json.loads(text)["runs"][1]["rounds"][0][-1]["losses"]["lm loss"] == "nan"


def test_a_run_with_fewer_steps_is_different(tmp_path: Path) -> None:
    answer = judge(
        [own(tmp_path), contender(tmp_path, losses=LOSSES[:-1])], speed_only=False
    )
    assert answer.code == DIFFERENT
    assert answer.rows[1].reason == "it trained 4 steps, but the reference trained 5"


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    failed = contender(
        tmp_path, Candidate("bitpipe", ("--enable-bitpipe-schedule",)), rounds=(0.1,)
    )
    failed.failure = "round 2: localhost: rank 1 was killed by SIGKILL"
    answer = judge([own(tmp_path), contender(tmp_path), failed], speed_only=False)
    assert answer.code == FAILED
    assert answer.rows[2].step_s == pytest.approx(0.1)
    assert answer.keep == ["--pipeline-schedule", "zb-v"]
    assert "bitpipe: round 2: localhost: rank 1 was killed by SIGKILL" in answer_text(
        answer
    )


def test_without_the_reference_there_is_nothing_to_compare_with() -> None:
    reference = Contender(Candidate(REFERENCE, ()), BITS, failure="out of memory")
    answer = judge([reference, Contender(ZB_V, BITS)], speed_only=False)
    assert answer.code == FAILED
    assert answer.verdict.startswith(
        "Megatron's own failed, so there is nothing to compare with"
    )
    assert answer_text(answer)


def test_speed_alone_judges_no_numbers(tmp_path: Path) -> None:
    other = contender(tmp_path, losses=tuple(2 * loss for loss in LOSSES))
    answer = judge([own(tmp_path), other], speed_only=True)
    assert answer.code == EQUAL
    assert answer.rows[1].judgement == "not judged"
    assert "each run drew its own weights" in answer.rows[1].reason
