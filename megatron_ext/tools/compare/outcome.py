"""Judges a comparison's runs: which one is fastest, and whether the numbers match."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.tools.compare.run_records import (
    Deviation,
    Deviations,
    RunRecord,
    Step,
    deviations,
    largest,
    other_steps,
)
from megatron_ext.tools.compare.tolerances import are_rounding
from megatron_ext.tracing.digest_files import MEGATRONS

if TYPE_CHECKING:
    from megatron_ext.tools.compare.recipe import Candidate
    from megatron_ext.tools.compare.tolerances import Promise

Judgement = Literal[
    "reference", "equal", "close", "different", "unproven", "not judged", "failed"
]
"""How a contender's numbers are judged.

    unproven     nothing can be concluded, for example because losses are NaN in both runs, or a run
                 did not run its schedule
    not judged   the numbers do not have to match, or there are none
"""

EQUAL = 0
FAILED = 1
REFUSED = 2
DIFFERENT = 3
"""Exit codes of `megatron-ext compare`."""
_FAST_SHARE = 0.1
_SLOW_SHARE = 0.9
_WRONG: tuple[Judgement, ...] = ("different", "unproven", "failed")
"""Judgements that rule out recommending a contender, however fast it is."""


@dataclass
class Contender:
    """A candidate and the results of its runs so far."""

    candidate: Candidate
    promise: Promise
    """How closely its numbers must match the reference's."""
    schedule: str = MEGATRONS
    """The schedule that must run in every step."""
    is_carried: bool = False
    """Whether our transport must carry all messages of Megatron's own schedule, in every step."""
    chooses_wires: bool = False
    """Whether ranks choose the wires themselves (`--pipeline-transport auto`)."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, such as settings that the schedule ignores, changes or replaces."""
    records: list[RunRecord] = field(default_factory=list)
    """The results from each round."""
    bubble_ratio: float | None = None
    """Share of the pipeline time that ranks spend idle, or None if it was not measured."""
    timeline: dict[str, Any] | None = None
    """A traced step, in the format used by the trace page, or None if no step was traced."""
    failure: str = ""
    """Why one of its runs failed, or empty if none did."""
    is_refused: bool = False
    """Whether it failed because a rank rejected its flags before training began."""
    located: str = ""
    """The first tensor that differs from the reference, or empty if there was no search for it."""

    @property
    def substitute(self) -> str:
        """The schedule or wire that replaced the requested one in some steps, or empty."""
        for record in self.records:
            if substitute := self.substitute_in(record):
                return substitute
        return ""

    def substitute_in(self, record: RunRecord) -> str:
        """Return what replaced the pipeline in one run, or empty if the pipeline always ran."""
        return record.substitute(self.schedule, is_carried=self.is_carried)

    @property
    def gap(self) -> str:
        """Which records are missing, or an empty text if all ranks recorded all steps."""
        for record in self.records:
            if record.gap:
                return record.gap
        return ""

    @property
    def departures(self) -> set[str]:
        """Sentences about how its ranks departed from their settings in any round."""
        sentences: set[str] = set()
        for record in self.records:
            sentences.update(record.departures)
        return sentences


@dataclass(frozen=True)
class Row:
    """A contender, as shown in the answer."""

    label: str
    flags: list[str]
    judgement: Judgement
    reason: str
    """Why the numbers do not match or were not judged, what failed, or what ran instead; may be
    empty."""
    step_s: float | None
    """Median step time, averaged over the rounds, which cancels steady drift."""
    fast_s: float | None
    """10th percentile of the step time."""
    slow_s: float | None
    """90th percentile of the step time."""
    drift: float
    """Range of the rounds' medians, relative to the smallest median."""
    speed: float | None
    """Speed relative to the reference, or None if either of the two did not run its schedule."""
    tokens_per_s: float | None
    memory_bytes: int
    """Peak memory on the rank that uses the most."""
    bubble_ratio: float | None
    num_steps: int
    """Number of steps in the shortest run."""
    deviations: Deviations | None
    """Differences from the reference, or None if this is the reference or nothing was compared."""
    repeats: Deviations | None
    """Differences between this contender's rounds, or None if it ran only once."""
    notes: list[str]
    located: str
    """The first tensor that differs, or empty if there was no search for it."""


@dataclass(frozen=True)
class Answer:
    """The result of a comparison."""

    rows: list[Row]
    """One row per contender; the reference comes first."""
    verdict: str
    """The conclusion in one sentence."""
    keep: list[str]
    """Flags of the fastest contender with correct numbers, or empty if the reference is fastest."""
    code: int
    gain_is_noise: bool = False
    """Whether the gain from these flags is no larger than the difference between two rounds."""

    @property
    def keep_heading(self) -> str:
        """The text that precedes the flags to keep."""
        if self.gain_is_noise:
            return "Flags to keep if the gain repeats with more --rounds"
        return "Flags to keep"


def judge(
    contenders: Sequence[Contender],
    *,
    speed_only: bool = False,
    against_itself: bool = False,
) -> Answer:
    """Return the answer to a comparison. The first contender is the reference.

    Args:
        contenders: The contenders and their finished runs. If the comparison was stopped, some runs
            may be missing.
        speed_only: Whether every run drew different weights, so their numbers cannot be compared.
        against_itself: Whether the contenders are two runs of the same, unchanged recipe.
    """
    reference = contenders[0]
    rows = [_row(reference, reference, speed_only=speed_only)]
    for contender in contenders[1:]:
        rows.append(_row(contender, reference, speed_only=speed_only))
    judgements = [row.judgement for row in rows]
    code = EQUAL
    failed = [contender for contender in contenders if contender.failure]
    if failed:
        # Ranks may reject flags that the checks before the launch could not judge.
        all_refused = all(contender.is_refused for contender in failed)
        code = REFUSED if all_refused else FAILED
    # The user asked if the numbers match, and there is no answer.
    if "unproven" in judgements:
        code = FAILED
    # Wrong numbers are worse than a failed run, so they determine the exit code.
    if "different" in judgements:
        code = DIFFERENT
    if against_itself:
        return Answer(rows, _verdict_of_itself(rows), [], code)
    best = _best(rows)
    if best is None:
        return Answer(rows, _verdict(rows, best), [], code)
    return Answer(
        rows,
        _verdict(rows, best),
        best.flags,
        code,
        gain_is_noise=is_noise(best, rows[0]),
    )


def _row(contender: Contender, reference: Contender, *, speed_only: bool) -> Row:
    records = contender.records
    is_reference = contender is reference
    step_s = median_s(records)
    reference_s = median_s(reference.records)
    fast_s, slow_s = _range_s(records)
    speed = None
    is_substituted = bool(contender.substitute or reference.substitute)
    has_comparable_speed = not is_reference and not is_substituted
    if step_s and reference_s and has_comparable_speed:
        speed = reference_s / step_s
    # All rounds train on the same batches, so use the token count of
    # any round that knows it.
    known_tokens = [record.tokens for record in records if record.tokens is not None]
    tokens_per_s = None
    if known_tokens and step_s:
        tokens_per_s = known_tokens[0] / step_s
    # Compare every round, because a race, for example, changes the
    # numbers in only some of them.
    difference = None
    repeats = None
    has_comparable_numbers = not is_reference and not speed_only
    if records and reference.records and has_comparable_numbers:
        first_record = reference.records[0]
        difference = largest([deviations(first_record, record) for record in records])
    if not speed_only:
        repeats = _repeats(contender)
    judgement, reason = _judged(contender, reference, difference)
    if speed_only and judgement == "not judged":
        reason = "each run drew its own weights (--speed-only)"
    return Row(
        label=contender.candidate.label,
        flags=list(contender.candidate.flags),
        judgement=judgement,
        reason=reason,
        step_s=step_s,
        fast_s=fast_s,
        slow_s=slow_s,
        drift=_drift(records),
        speed=speed,
        tokens_per_s=tokens_per_s,
        memory_bytes=max((record.memory_bytes for record in records), default=0),
        bubble_ratio=contender.bubble_ratio,
        num_steps=min((len(record.steps) for record in records), default=0),
        deviations=difference,
        repeats=repeats,
        notes=_notes(contender),
        located=contender.located,
    )


def _range_s(records: Sequence[RunRecord]) -> tuple[float | None, float | None]:
    """Return the range that most step times fall into, or None if no step was timed."""
    durations_s: list[float] = []
    for record in records:
        durations_s += record.durations_s
    if not durations_s:
        return None, None
    durations_s.sort()
    fast_s = _percentile(durations_s, _FAST_SHARE)
    slow_s = _percentile(durations_s, _SLOW_SHARE)
    return fast_s, slow_s


def _notes(contender: Contender) -> list[str]:
    """Return the notes on a contender's runs, without repetitions."""
    notes = list(contender.notes)
    for record in contender.records:
        notes += record.notes
        if contender.chooses_wires and record.wires:
            wires = " and ".join(sorted(record.wires))
            notes.append(f"messages over {wires}")
    return list(dict.fromkeys(notes))  # rounds repeat each other's notes


def _judged(
    contender: Contender, reference: Contender, difference: Deviations | None
) -> tuple[Judgement, str]:
    """Return the judgement on a contender and the reason for it."""
    if contender.failure:
        return "failed", contender.failure
    if contender is reference:
        return "reference", contender.substitute
    if contender.substitute:
        return "unproven", contender.substitute
    if reference.substitute:
        return "unproven", f"{reference.candidate.label}: {reference.substitute}"
    promise = contender.promise
    if difference is None or promise.loss is None or promise.norm is None:
        return "not judged", promise.reason
    for record in contender.records:
        if reason := other_steps(record, reference.records[0]):
            return "different", reason
    return _judged_numbers(contender, reference, difference)


def _judged_numbers(
    contender: Contender, reference: Contender, difference: Deviations
) -> tuple[Judgement, str]:
    """Return the judgement on a contender that trained the same steps as the reference, and why."""
    promise = contender.promise
    assert promise.loss is not None
    assert promise.norm is not None
    gap = _gap(contender, reference, difference)
    if difference.are_none:
        if gap:
            return "unproven", gap
        return "equal", ""
    if difference.skipped is not None:
        return (
            "different",
            f"only one of the two runs skipped iteration {difference.skipped}",
        )
    is_allowed = (
        _relative(difference.loss) <= promise.loss
        and _relative(difference.norm) <= promise.norm
    )
    if is_allowed:
        if gap:
            return "unproven", gap
        return "close", f"{promise.reason}; allowed: {promise.allowance}"
    # If two rounds of the reference differ by as much, the difference means nothing. A
    # contender whose own rounds differ has no such excuse, because it may have a race.
    repeats = _repeats(reference)
    if repeats is not None and _is_as_small(difference, repeats, promise):
        if gap:
            return "unproven", gap
        if are_rounding(repeats):
            return "close", (
                "the recipe is not deterministic: two runs with the same flags differ by as much; "
                "compare --self shows more"
            )
        return "unproven", (
            "two runs of the reference differ by as much, which is more than rounding explains; "
            "compare --self --locate shows where"
        )
    if promise.is_exact:
        return "different", "the numbers should be identical to the last bit"
    return "different", f"the differences exceed the allowed {promise.allowance}"


def _gap(contender: Contender, reference: Contender, difference: Deviations) -> str:
    """Return why identical numbers prove nothing, or empty if they do prove something."""
    for record in reference.records[1:]:
        if other_steps(record, reference.records[0]):
            return "two runs of the reference trained different steps"
    return difference.gap or contender.gap or reference.gap


def _relative(deviation: Deviation | None) -> float:
    if deviation is None:
        return 0.0
    return deviation.relative


def _is_as_small(difference: Deviations, repeats: Deviations, promise: Promise) -> bool:
    """Return whether losses and norms differ no more than they do between two reference runs.

    Two runs show only part of the variation in a recipe that is not deterministic, so allow twice
    as much.
    """
    allowed_loss = max(2 * _relative(repeats.loss), promise.loss or 0.0)
    allowed_norm = max(2 * _relative(repeats.norm), promise.norm or 0.0)
    return (
        _relative(difference.loss) <= allowed_loss
        and _relative(difference.norm) <= allowed_norm
    )


def _repeats(contender: Contender) -> Deviations | None:
    """Return how a contender's rounds differ, which shows if it is deterministic.

    Return None if the contender has trained only one round.
    """
    if len(contender.records) < 2:
        return None
    first = contender.records[0]
    later_rounds = contender.records[1:]
    return largest([deviations(first, record) for record in later_rounds])


def median_s(records: Sequence[RunRecord]) -> float | None:
    """Return the median step time, averaged over the rounds."""
    medians_s = _medians_s(records)
    if not medians_s:
        return None
    return statistics.fmean(medians_s)


def _medians_s(records: Sequence[RunRecord]) -> list[float]:
    medians_s = []
    for record in records:
        durations_s = record.durations_s
        if durations_s:
            medians_s.append(statistics.median(durations_s))
    return medians_s


def _drift(records: Sequence[RunRecord]) -> float:
    medians_s = _medians_s(records)
    if not medians_s:
        return 0.0
    return max(medians_s) / min(medians_s) - 1


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, using linear interpolation."""
    # Before Python 3.13, `statistics.quantiles` rejects a single value.
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = math.ceil(position)
    distance = ordered[above] - ordered[below]
    return ordered[below] + (position - below) * distance


def _best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row with correct numbers, or None if none beats the reference."""
    # Some rows' numbers are not judged, for example because of
    # dropout. That is not an error.
    usable = [row for row in rows[1:] if row.judgement not in _WRONG]
    faster = [row for row in usable if row.speed is not None and row.speed > 1]
    return max(faster, key=lambda row: row.speed or 0.0, default=None)


def _verdict(rows: Sequence[Row], best: Row | None) -> str:
    """Return the sentence below the table."""
    reference = rows[0]
    wrong = [row.label for row in rows if row.judgement == "different"]
    failed = [row.label for row in rows if row.judgement == "failed"]
    parts = []
    if reference.judgement == "failed":
        return f"{reference.label} failed, so there is nothing to compare with: {reference.reason}"
    if wrong:
        parts.append(
            f"{' and '.join(wrong)} and {reference.label} produced different numbers"
        )
    if failed:
        parts.append(f"{' and '.join(failed)} failed")
    for row in rows:
        if row.judgement == "unproven":
            parts.append(f"{row.label} proves nothing ({row.reason})")
    if best is not None and best.speed is not None:
        pace = f"{best.label} is {best.speed:.2f} x as fast as {reference.label}"
        if is_noise(best, reference):
            noise = max(best.drift, reference.drift)
            pace = (
                f"{best.label} may not be faster than {reference.label}: it gained "
                f"{100 * (best.speed - 1):.1f} %, but rounds of the same run differed by "
                f"{100 * noise:.1f} %"
            )
        parts.append(f"{pace}, {_numbers_text(best)}")
    else:
        # If no contender is faster, report the one that comes closest.
        slower = []
        for row in rows[1:]:
            if row.speed is not None and row.judgement not in _WRONG:
                slower.append(row)
        if slower and not wrong:
            closest = max(slower, key=lambda row: row.speed or 0.0)
            parts.append(
                f"nothing is faster than {reference.label}: {closest.label} is "
                f"{closest.speed:.2f} x as fast, {_numbers_text(closest)}"
            )
    return f"{'; '.join(parts) or 'no run has finished'}."


def _verdict_of_itself(rows: Sequence[Row]) -> str:
    """Return the sentence below the table for `--self`."""
    _, second = rows
    for row in rows:
        if row.judgement == "failed":
            return f"{row.label}, failed: {row.reason}."
    if second.judgement == "equal":
        return f"the recipe is deterministic: it trained twice {_numbers_text(second)}."
    # The answer is unknown if, for example, one of the two runs did not finish.
    first_iteration = None
    if second.deviations is not None:
        first_iteration = second.deviations.first_iteration
    if first_iteration is None or second.judgement == "unproven":
        return f"unknown whether the recipe is deterministic: {second.reason}."
    return f"the recipe is not deterministic: two runs differ from iteration {first_iteration} on."


def is_noise(row: Row, reference: Row) -> bool:
    """Return whether a row is as fast as the reference, up to the variation between rounds."""
    assert row.speed is not None
    return abs(row.speed - 1) <= max(row.drift, reference.drift)


def _numbers_text(row: Row) -> str:
    """Return the part of the verdict about a row's losses and gradient norms."""
    if row.judgement == "equal":
        assert row.deviations is not None
        numbers = "losses and gradient norms" if row.deviations.num_norms else "losses"
        return f"with the same {numbers} to the last bit over {row.num_steps} steps"
    if row.judgement == "close":
        return f"with losses and gradient norms that differ by rounding ({row.reason})"
    return f"and its numbers are not judged ({row.reason})"


def as_json(answer: Answer, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Return the answer for `--json`, including the numbers for every step."""
    rows = []
    for row, contender in zip(answer.rows, contenders, strict=True):
        rounds = []
        for record in contender.records:
            rounds.append([_step_json(step) for step in record.steps])
        repeats = None
        if row.repeats is not None:
            repeats = row.repeats.are_none
        rows.append(
            {
                "label": row.label,
                "flags": row.flags,
                "judgement": row.judgement,
                "reason": row.reason,
                "step_s": row.step_s,
                "fast_s": row.fast_s,
                "slow_s": row.slow_s,
                "drift": row.drift,
                "speed": row.speed,
                "tokens_per_s": row.tokens_per_s,
                "memory_bytes": row.memory_bytes,
                "bubble_ratio": row.bubble_ratio,
                "num_steps": row.num_steps,
                "loss_difference": _difference_json(row.deviations, "loss"),
                "gradient_norm_difference": _difference_json(row.deviations, "norm"),
                "repeats": repeats,
                "notes": row.notes,
                "located": row.located,
                "rounds": rounds,
            }
        )
    content = {
        "verdict": answer.verdict,
        "keep": answer.keep,
        "exit_code": answer.code,
        "runs": rows,
    }
    finite: dict[str, Any] = with_finite_numbers(content)
    return finite


def _step_json(step: Step) -> dict[str, Any]:
    wires = None
    if step.wires is not None:
        wires = sorted(step.wires)
    return {
        "iteration": step.iteration,
        "losses": step.losses,
        "gradient_norm": step.gradient_norm,
        "skipped": step.skipped,
        "duration_s": step.duration_s,
        "schedules": sorted(step.schedules),
        "wires": wires,
        "num_slices": step.num_slices,
    }


def with_finite_numbers(content: Any) -> Any:
    """Return JSON content with `nan` and `inf` as text, because JSON cannot represent them."""
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {key: with_finite_numbers(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [with_finite_numbers(value) for value in content]
    return content


def _difference_json(difference: Deviations | None, kind: str) -> dict[str, Any] | None:
    """Return the largest difference of one kind as JSON, or None if nothing was compared."""
    if difference is None:
        return None
    deviation: Deviation | None = getattr(difference, kind)
    if deviation is None:
        return {"relative": 0.0}
    return {
        "relative": deviation.relative,
        "name": deviation.name,
        "iteration": deviation.iteration,
        "reference": deviation.reference,
        "candidate": deviation.candidate,
    }
