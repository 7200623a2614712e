"""Reads the records that a run's ranks write (`megatron_ext/tracing/step_records.py`)."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.tracing.digest_files import MEGATRONS

WARMUP_STEPS = 3
"""Number of steps at the start of a run that are not measured, because ranks are still connecting
to each other and allocating memory."""
_MAX_BYTES = 64 << 20
_NORM = "gradient norm"
_MEGATRONS_WIRE = "torch.distributed"


@dataclass(frozen=True)
class Step:
    """One training step in a run."""

    iteration: int
    losses: dict[str, float]
    gradient_norm: float | None
    skipped: bool
    """Whether the optimizer skipped the weight update."""
    duration_s: float | None
    """Mean over all ranks, or None if not measured."""
    learning_rate: float | None = None
    """None: unknown."""
    schedules: frozenset[str] = frozenset({MEGATRONS})
    """The schedules that ranks ran. All ranks should have run the same one."""
    wires: frozenset[str] | None = None
    """The wires of our transport, or None if it did not carry all ranks' messages."""
    num_slices: int | None = None
    """Number of slices in the most finely cut micro-batch, or None if slices do not depend on
    lengths."""

    @property
    def numbers(self) -> dict[str, float | None]:
        """The losses and the gradient norm, by name."""
        return {**self.losses, _NORM: self.gradient_norm}


@dataclass(frozen=True)
class RunRecord:
    """The results of one run of a candidate."""

    steps: list[Step]
    memory_bytes: int = 0
    """Peak memory on the rank that uses the most."""
    tokens: int | None = None
    """Tokens in the median step, or None if not known."""
    num_ranks: int = 0
    gap: str = ""
    """What some ranks did not record, or empty if all ranks recorded all steps."""
    departures: list[str] = field(default_factory=list)
    """Sentences about how ranks departed from their settings."""

    @property
    def durations_s(self) -> list[float]:
        """Durations of the measured steps."""
        durations = []
        for step in self.steps[WARMUP_STEPS:]:
            if step.duration_s is not None:
                durations.append(step.duration_s)
        return durations

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about gaps, departures, and steps without slices."""
        notes = []
        if self.gap:
            notes.append(self.gap)
        notes += self.departures
        if not self.durations_s:
            notes.append(
                f"no step time: it trained {len(self.steps)} steps, and the first {WARMUP_STEPS} "
                "are not measured"
            )
        nums_slices = [step.num_slices for step in self.steps]
        if num_whole := nums_slices.count(1):
            notes.append(
                f"in {num_whole} of {len(self.steps)} steps, no micro-batch was long enough to be "
                "cut into slices"
            )
        return notes

    @property
    def wires(self) -> set[str]:
        """The wires that carried messages. Megatron's own messages use torch.distributed."""
        wires: set[str] = set()
        for step in self.steps:
            if step.wires is None:
                wires.add(_MEGATRONS_WIRE)
            else:
                wires |= step.wires
        return wires

    def substitute(self, schedule: str, *, is_carried: bool) -> str:
        """Return what ran instead of the requested pipeline, or an empty text if it always ran.

        Args:
            schedule: The name of the requested schedule.
            is_carried: Whether our transport must carry the messages.
        """
        substitutes: set[str] = set()
        iterations = []
        for step in self.steps:
            if step.schedules != {schedule}:
                substitutes |= step.schedules - {schedule}
                iterations.append(step.iteration)
        requested = schedule
        if not iterations and is_carried:
            iterations = [step.iteration for step in self.steps if step.wires is None]
            substitutes = {_MEGATRONS_WIRE}
            requested = "--pipeline-transport"
        if not iterations:
            return ""
        substitute_names = " and ".join(sorted(substitutes))
        return (
            f"{substitute_names} ran instead of {requested} in "
            f"{len(iterations)} of {len(self.steps)} steps, first in iteration {iterations[0]}"
        )


def read(folder: Path) -> RunRecord:
    """Return the results that a run's ranks recorded in a folder.

    Raises:
        DataError: There are no records, or two ranks disagree about a step.
    """
    ranks = [list(_lines(path)) for path in folder.glob("rank-*.jsonl")]
    # The first line is a header. If a rank died during its first
    # step, there is nothing else.
    ranks = [lines for lines in ranks if len(lines) > 1]
    # Sort the ranks, because the last rank's losses take precedence (`_step`).
    ranks.sort(key=lambda lines: lines[0]["rank"])
    if not ranks:
        raise DataError(
            "no step was recorded; compare needs a script that trains with Megatron's own loop "
            "(megatron.training's pretrain), and a work directory that all hosts share"
        )
    headers = [lines[0] for lines in ranks]
    bodies = [lines[1:] for lines in ranks]
    # A killed rank may be missing the last steps that other ranks recorded.
    num_steps = max(len(body) for body in bodies)
    steps = []
    for index in range(num_steps):
        lines_of_step = [body[index] for body in bodies if index < len(body)]
        steps.append(_step(lines_of_step))
    departures: dict[str, None] = {}  # an ordered set
    memories_bytes = []
    for body in bodies:
        for line in body:
            departures |= dict.fromkeys(line["departures"])
            memories_bytes.append(line["memory_bytes"])
    return RunRecord(
        steps,
        memory_bytes=max(memories_bytes),
        tokens=_tokens(bodies[0], headers[0]["seq_length"]),
        num_ranks=headers[0]["world_size"],
        gap=_gap(headers, bodies),
        departures=list(departures),
    )


def _gap(
    headers: Sequence[dict[str, Any]],
    bodies: Sequence[Sequence[Any]],
) -> str:
    """Return what some ranks did not record, or an empty text."""
    num_ranks = headers[0]["world_size"]
    if len(bodies) < num_ranks:
        return f"{len(bodies)} of {num_ranks} ranks left a record"
    num_steps = max(len(body) for body in bodies)
    for header, body in zip(headers, bodies, strict=True):
        if len(body) < num_steps:
            return f"rank {header['rank']} recorded {len(body)} of {num_steps} steps"
    return ""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a record's lines, except for an incomplete last line."""
    text = path.read_bytes()[:_MAX_BYTES].decode(errors="replace")
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _step(lines: Sequence[dict[str, Any]]) -> Step:
    """Combine all ranks' records of one step.

    Raises:
        DataError: Two ranks disagree about the step.
    """
    _check_agreement(lines)
    durations_s = _known(lines, "duration_s")
    norms = _known(lines, "gradient_norm")
    values_of_loss: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, value in line["losses"].items():
            values_of_loss[name].append(value)
    wires_of_ranks = [line["wires"] for line in lines]
    wires = None
    if None not in wires_of_ranks:
        wires = frozenset(itertools.chain.from_iterable(wires_of_ranks))
    losses = {}
    for name, values in values_of_loss.items():
        losses[name] = _mean(values)
    gradient_norm = None
    if norms:
        gradient_norm = norms[0]
    duration_s = None
    if durations_s:
        duration_s = statistics.fmean(durations_s)
    return Step(
        iteration=lines[0]["iteration"],
        losses=losses,
        gradient_norm=gradient_norm,
        skipped=any(_known(lines, "skipped")),
        duration_s=duration_s,
        learning_rate=max(_known(lines, "learning_rate"), default=None),
        schedules=frozenset(line["schedule"] for line in lines),
        wires=wires,
        num_slices=max(_known(lines, "num_slices"), default=None),
    )


def _known(lines: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Return a field's values from the ranks that know it.

    For example, a disaggregated job's forward ranks have no optimizer, and only ranks with
    parameters know the learning rate.
    """
    return [line[name] for line in lines if line[name] is not None]


def _check_agreement(lines: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks recorded the same step.

    Raises:
        DataError: Two ranks disagree about the step.
    """
    iteration = lines[0]["iteration"]
    # Every rank records the norm of the whole model.
    norms = _known(lines, "gradient_norm")
    for norm in norms:
        if not is_same(norm, norms[0]):
            raise DataError(
                f"ranks disagree about the gradient norm of iteration {iteration}: {norms[0]!r} "
                f"and {norm!r}; their weights are no longer the same"
            )
    for line in lines:
        if line["iteration"] != iteration:
            raise DataError(
                f"ranks disagree about the number of an iteration: {iteration} and "
                f"{line['iteration']}; they trained on different batches"
            )
    if len(set(_known(lines, "skipped"))) > 1:
        raise DataError(
            f"only some of the ranks skipped iteration {iteration}; their weights are no longer "
            "the same"
        )


def other_steps(record: RunRecord, reference: RunRecord) -> str:
    """Describe the steps that a run trained; empty if they match the reference's."""
    iterations = [step.iteration for step in record.steps]
    expected = [step.iteration for step in reference.steps]
    if iterations == expected:
        return ""
    if len(iterations) != len(expected):
        return f"it trained {len(iterations)} steps, but the reference trained {len(expected)}"
    return (
        f"it trained iterations {iterations[0]} to {iterations[-1]}, but the reference trained "
        f"{expected[0]} to {expected[-1]}"
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean over ranks, or exactly the common value if all ranks agree."""
    if all(is_same(value, values[0]) for value in values):
        return values[0]
    # Some loss functions do not average over replicas. A single rank's value would hide
    # what the other replicas computed.
    return statistics.fmean(values)


def _tokens(lines: Sequence[dict[str, Any]], seq_length: int | None) -> int | None:
    counts = []
    for line in lines:
        count = line["consumed_samples"]
        if count is not None:
            counts.append(count)
    if seq_length is None or len(counts) < 2:
        return None
    # Records contain the total number of samples consumed since training started.
    samples_of_steps = []
    for before, after in itertools.pairwise(counts):
        samples_of_steps.append(after - before)
    return int(statistics.median(samples_of_steps) * seq_length)


def is_same(first: float | None, second: float | None) -> bool:
    """Return whether two numbers are bit-identical. NaN counts as equal to NaN."""
    if first is None or second is None:
        return first is second
    return first == second or (math.isnan(first) and math.isnan(second))


@dataclass(frozen=True)
class Deviation:
    """The largest difference in one kind of number between two runs."""

    name: str
    """Name of the number: `lm loss`, `gradient norm`."""
    iteration: int
    reference: float | None
    candidate: float | None

    @property
    def is_finite(self) -> bool:
        """Whether neither number is infinite or NaN."""
        numbers = self.reference, self.candidate
        return all(number is None or math.isfinite(number) for number in numbers)

    @property
    def relative(self) -> float:
        """The difference relative to the reference, or infinity if either number is not finite."""
        reference = self.reference
        candidate = self.candidate
        if is_same(reference, candidate):
            return 0.0
        if reference is None or candidate is None:
            return math.inf
        if not self.is_finite:
            return math.inf
        magnitude = max(abs(reference), 1e-30)
        return abs(candidate - reference) / magnitude


@dataclass(frozen=True)
class Deviations:
    """How two runs' numbers differ."""

    loss: Deviation | None
    """The largest deviation in a loss, or None if all losses are bit-identical."""
    norm: Deviation | None
    """The largest deviation in a gradient norm, or None if all norms are bit-identical."""
    first_iteration: int | None
    """The first iteration in which any number differs."""
    num_losses: int = 0
    """Number of losses that both runs recorded."""
    num_norms: int = 0
    """Number of gradient norms that both runs recorded. Zeros do not count, because with
    `--clip-grad 0`, some of Megatron's optimizers report 0.0 instead of a norm."""
    num_updates: int = 0
    """Number of steps in which neither run skipped the weight update."""
    num_weight_changes: int = 0
    """Number of these steps whose learning rate is not 0, or is unknown."""
    num_gradients: int = 0
    """Number of these steps in which gradients were compared, by their norm or by a later loss that
    depends on the weights they changed."""
    without_loss: int | None = None
    """The first iteration that both runs trained without recording a loss, or None."""
    not_finite: Deviation | None = None
    """The first number that is infinite or NaN in both runs, or None if there is none."""
    skipped: int | None = None
    """The first iteration that only one of the two runs skipped."""

    @property
    def are_none(self) -> bool:
        """Whether all numbers are identical to the last bit."""
        return self.loss is None and self.norm is None and self.skipped is None

    @property
    def gap(self) -> str:
        """Why identical numbers in these runs prove nothing; empty if they do prove something."""
        if self.not_finite is not None:
            name = self.not_finite.name
            iteration = self.not_finite.iteration
            return f"{name} is {self.not_finite.reference} in both runs at iteration {iteration}"
        if not self.num_losses:
            return "the runs recorded no losses"
        if not self.num_updates:
            return (
                "the optimizer skipped every step, so no gradient was compared; lower "
                "--initial-loss-scale, or train more --steps"
            )
        if self.without_loss is not None:
            return f"the runs recorded no loss at iteration {self.without_loss}"
        if not self.num_gradients and self.num_weight_changes:
            return (
                "no gradient norm was recorded, and no loss after a weight update, so no gradient "
                "was compared; train at least 2 steps, or set --clip-grad"
            )
        if not self.num_gradients:
            return (
                "the learning rate is 0 and no gradient norm was recorded, so no gradient was "
                "compared; raise --lr, or set --clip-grad"
            )
        return ""


def deviations(reference: RunRecord, candidate: RunRecord) -> Deviations:
    """Compare two runs' numbers, iteration by iteration."""
    candidate_steps = {step.iteration: step for step in candidate.steps}
    num_losses = 0
    num_norms = 0
    updates = _Updates()
    losses: list[Deviation] = []
    norms: list[Deviation] = []
    first_iteration: int | None = None
    skipped: int | None = None
    not_finite: Deviation | None = None
    without_loss: int | None = None
    for step in reference.steps:
        other = candidate_steps.get(step.iteration)
        if other is None:
            continue
        updates.add(step, other)
        num_norms += bool(step.gradient_norm and other.gradient_norm)
        is_update = not (step.skipped or other.skipped)
        has_loss = bool(step.losses or other.losses)
        if without_loss is None and is_update and not has_loss:
            without_loss = step.iteration
        if skipped is None and step.skipped != other.skipped:
            skipped = step.iteration
        step_numbers = step.numbers
        other_numbers = other.numbers
        for name in sorted({*step_numbers, *other_numbers}):
            number = step_numbers.get(name)
            other_number = other_numbers.get(name)
            deviation = Deviation(name, step.iteration, number, other_number)
            if name != _NORM:
                num_losses += number is not None and other_number is not None
            if is_same(number, other_number):
                if not_finite is None and not deviation.is_finite:
                    not_finite = deviation
                continue
            if name == _NORM:
                norms.append(deviation)
            else:
                losses.append(deviation)
            if first_iteration is None:
                first_iteration = step.iteration
    if first_iteration is None:
        first_iteration = skipped
    return Deviations(
        loss=_largest(losses),
        norm=_largest(norms),
        first_iteration=first_iteration,
        num_losses=num_losses,
        num_norms=num_norms,
        num_updates=updates.num_updates,
        num_weight_changes=updates.num_weight_changes,
        num_gradients=updates.num_gradients,
        without_loss=without_loss,
        not_finite=not_finite,
        skipped=skipped,
    )


@dataclass
class _Updates:
    """The weight updates of two runs, and how many of them a compared number depends on."""

    num_updates: int = 0
    num_weight_changes: int = 0
    num_gradients: int = 0
    _num_unseen_changes: int = 0
    """Weight changes since the last loss, which no number depends on yet."""

    def add(self, step: Step, other: Step) -> None:
        """Count an iteration of both runs."""
        # The step computes its loss before it updates the weights, so its loss depends on
        # earlier updates only.
        if step.losses and other.losses:
            self.num_gradients += self._num_unseen_changes
            self._num_unseen_changes = 0
        if step.skipped or other.skipped:
            return
        self.num_updates += 1
        # With a learning rate of 0, later losses do not depend on the gradients.
        changes_weights = step.learning_rate != 0
        self.num_weight_changes += changes_weights
        if step.gradient_norm and other.gradient_norm:
            self.num_gradients += 1
        elif changes_weights:
            self._num_unseen_changes += 1


def largest(rounds: Sequence[Deviations]) -> Deviations:
    """Return the largest deviations over several runs of one candidate.

    The counts of compared values are the smallest of all runs.
    """
    losses: list[Deviation] = []
    norms: list[Deviation] = []
    not_finite: Deviation | None = None
    for one_round in rounds:
        if one_round.loss is not None:
            losses.append(one_round.loss)
        if one_round.norm is not None:
            norms.append(one_round.norm)
        if not_finite is None:
            not_finite = one_round.not_finite
    return Deviations(
        loss=_largest(losses),
        norm=_largest(norms),
        first_iteration=_earliest(one_round.first_iteration for one_round in rounds),
        num_losses=min(one_round.num_losses for one_round in rounds),
        num_norms=min(one_round.num_norms for one_round in rounds),
        num_updates=min(one_round.num_updates for one_round in rounds),
        num_weight_changes=min(one_round.num_weight_changes for one_round in rounds),
        num_gradients=min(one_round.num_gradients for one_round in rounds),
        without_loss=_earliest(one_round.without_loss for one_round in rounds),
        not_finite=not_finite,
        skipped=_earliest(one_round.skipped for one_round in rounds),
    )


def _earliest(iterations: Iterable[int | None]) -> int | None:
    numbers = [iteration for iteration in iterations if iteration is not None]
    return min(numbers, default=None)


def _largest(differing: Iterable[Deviation]) -> Deviation | None:
    return max(differing, key=lambda item: item.relative, default=None)
