"""Finds the first tensor that differs between two recorded training runs.

"First" refers to the order within a training step: the initial weights, forward passes from the
first layer to the last, backward passes from the last layer to the first, weight gradients as they
accumulate over micro-batches, their reduction, and the weights after the step. If several
micro-batches differ in the same place, the result lists all of them.

Two runs that sum in the same order must be bit-identical. If the order differs, for example because
one run has more replicas or tensor-parallel ranks, tensors may differ within a tolerance. The
tolerance is either fixed or learned from a run that uses the reference's flags but rounds
outputs differently (`tracing/rounding.py`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_ext.errors import DataError
from megatron_ext.tracing.digest_files import (
    FIRST_READING,
    KINDS,
    NO_MICROBATCH,
    OPERATORS,
    ROUNDING,
    VARIABLE,
    Header,
    Kind,
    RankFile,
    Record,
    read_folder,
)

_Key = tuple[Kind, int, str]

STATED_TOLERANCE = 1e-4
"""Relative difference that a different summation order may cause in the first step, in single
precision. Each later step multiplies it by `_GROWTH`."""
_GROWTH = 2.0
_UNKNOWN_BITS = ""
"""A value that never occurs as a record's bits."""
ORDER_OF_REPLICAS = (
    "the order in which three or more replicas sum a gradient depends on its place among the "
    "weights of its rank"
)
"""Why gradients may differ between runs that place the stages on different ranks."""
LEARNED_MARGIN = 4.0
"""Allowed difference for a tensor, as a multiple of the largest difference among its module's
tensors in the run with different rounding."""
_RESOLUTION = 1e-6
"""Smallest relative difference that digests can resolve, because they sum norms and projections in
single precision."""
_SIZES = {
    "tensor_size": "tensor-parallel ranks",
    "context_size": "context-parallel ranks",
    "expert_size": "expert-parallel ranks",
}
"""Header field -> its description. These fields determine the summation order for every tensor."""
LAYER = re.compile(r"(?P<stack>.*\blayers)\.(?P<number>\d+)(?:\.(?P<module>.*))?")
"""Matches the name of a layer, or of a module or parameter inside a layer."""
_WHOLE_MODEL = re.compile(r"(model \d+\.)?(stage \d+\.)?model")
"""Matches the name of a model as a whole, including a program's second model."""


@dataclass(frozen=True)
class Origin:
    """Where a run computed a tensor."""

    action: str
    """The action as written in the table, such as `2I3`, or empty if it was between actions."""
    rank: int
    host: str

    def __str__(self) -> str:
        """Return a readable description of where the tensor was computed."""
        text = f"rank {self.rank}"
        if self.host:
            text += f" on {self.host}"
        if self.action:
            text = f"{self.action}, {text}"
        return text


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs."""

    iteration: int
    """The training step, or 0 before the first step."""
    microbatches: tuple[int, ...]
    """Numbers (within the global batch) of all micro-batches that differ here, or empty if the
    tensor belongs to the whole step."""
    num_microbatches: int
    """Number of micro-batches in the global batch."""
    kind: Kind
    layer: int | None
    """Number of the layer in the model, from 0, or None if the tensor belongs to no layer."""
    module: str
    """Module or parameter, relative to its layer if there is one, or empty for the layer itself."""
    name: str
    """Full name of the module or parameter, including the layer number."""
    reference: Origin | None
    """None: the reference never computed the tensor."""
    candidate: Origin | None
    """None: the candidate never computed the tensor."""
    relative: float | None
    """Approximate norm of the difference, relative to the reference's norm. 0: the difference is
    too small for single precision to resolve. None: only one run computed the tensor, or the runs
    split it differently."""
    tolerance: float = 0.0
    """Allowed relative difference, or 0 if the tensors must be bit-identical."""

    @property
    def is_of_whole_model(self) -> bool:
        """Whether the tensor is the model's output or its gradient."""
        return _WHOLE_MODEL.fullmatch(self.name) is not None

    @property
    def tensor(self) -> str:
        """Description of the tensor."""
        where = self.module
        if self.layer is not None:
            where = f"layer {self.layer}"
            if self.module:
                where += f", {self.module}"
        if self.kind == "forward":
            return f"the output of {where}"
        # For the whole model, the recorded gradient is that of the output, but for a
        # module, it is that of the input.
        if self.kind == "backward":
            end = "output" if self.is_of_whole_model else "input"
            return f"the gradient of the {end} of {where}"
        names = {
            "weight gradient": "the weight gradient",
            "reduced gradient": "the reduced gradient",
            "weights": "the weight",
        }
        return f"{names[self.kind]} of {where}"

    @property
    def moment(self) -> str:
        """Description of when the tensor was computed."""
        if self.iteration == 0:
            return "before the first iteration"
        moment = f"iteration {self.iteration}"
        if self.kind == "weights":
            return f"after {moment}"
        if not self.microbatches:
            return moment
        if len(self.microbatches) == 1:
            return f"{moment}, micro-batch {self.microbatches[0]}"
        if len(self.microbatches) == self.num_microbatches:
            return f"{moment}, all {self.num_microbatches} micro-batches"
        numbers = ", ".join(str(number) for number in self.microbatches[:8])
        continuation = ", ..." if len(self.microbatches) > 8 else ""
        count = f"{len(self.microbatches)} of {self.num_microbatches}"
        return f"{moment}, {count} micro-batches ({numbers}{continuation})"

    def sentence(self) -> str:
        """Return a sentence that describes the difference."""
        first = f"first difference: {self.moment}: {self.tensor}"
        if self.candidate is None:
            return f"{first} ({self.reference}) was never computed by the candidate"
        if self.reference is None:
            return f"{first} ({self.candidate}) was never computed by the reference"
        if self.relative is None:
            amount = "in its norm"
        elif self.relative == 0.0:
            amount = "in its last bits"
        else:
            amount = f"by {self.relative:.2g} of its norm"
        if self.tolerance:
            amount += f", where {self.tolerance:.2g} is allowed"
        return f"{first} differs {amount}: reference {self.reference}; candidate {self.candidate}"


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs."""

    difference: Difference | None
    """The first difference, or None if no tensor differs by more than its tolerance."""
    num_steps: int
    """Number of steps compared, up to the one with the difference. The weights before the first
    step count as one step."""
    num_tensors: int
    tolerance: str
    """How much tensors may differ, and why."""
    notes: tuple[str, ...]
    """Notes on what could not be compared."""
    gap: str = ""
    """Why finding no difference proves nothing, or empty if it does prove something."""
    schedules: tuple[str, str] = ("", "")
    """The schedules of the reference and the candidate."""


def compare(
    reference: Path, candidate: Path, rounded: Path | None = None
) -> Comparison:
    """Compare two runs' digests.

    Args:
        reference: Folder with one run's digests, for example a run with Megatron's own schedule.
        candidate: Folder of the other run. Both runs must start from the same weights and read the
            same data.
        rounded: Folder of a run that used the reference's flags but rounded outputs differently.
            Its differences from the reference, times `LEARNED_MARGIN`, replace the stated
            tolerance.

    Raises:
        DataError: A folder has no digests, damaged digests, or digests from a different kind of
            run, some ranks' digests are missing, or the two runs' micro-batches cannot be matched.
    """
    first = _Run.read(reference)
    second = _Run.read(candidate)
    _check_alignment(first.header, second.header)
    # By design, a run with different rounding differs from every other run.
    runs = (reference, first), (candidate, second)
    for folder, run in runs:
        if run.header.rounded:
            raise DataError(
                f"{folder} was recorded with {ROUNDING}, which changes outputs; pass it as the "
                "third folder to learn tolerances from it"
            )
    tolerances: _Tolerances = _StatedTolerances(first.first_step)
    if rounded is not None:
        tolerances = _LearnedTolerances.of_runs(first, rounded)
    return _Comparing(first, second, tolerances).result()


def locate(reference: Path, candidate: Path) -> Difference | None:
    """Return the first tensor that differs between two runs, or None, using `compare`."""
    return compare(reference, candidate).difference


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """A tensor in one run, including all its parts."""

    parts: Mapping[str, Record]
    ranks: Mapping[str, Header]
    """Part -> header of the rank that recorded it."""

    def scaled(self, factor: float) -> _Tensor:
        """Return the tensor multiplied by a factor. The bits of the result are unknown."""
        if factor == 1.0:
            return self
        parts = {}
        for part, record in self.parts.items():
            projections = [factor * projection for projection in record.projections]
            # A gradient that lacks the factor is wrong even if its bits
            # match, so ignore the bits.
            parts[part] = record._replace(
                bits=_UNKNOWN_BITS,
                norm=factor * record.norm,
                projections=projections,
            )
        return _Tensor(parts, self.ranks)

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return all(math.isfinite(record.norm) for record in self.parts.values())

    @property
    def any_part(self) -> str:
        """The name of the first part, in alphabetical order."""
        return min(self.parts)

    def origin(self, part: str | None = None) -> Origin:
        """Return where a part was computed. If `part` is None or unknown, use the first part."""
        if part is None or part not in self.parts:
            part = self.any_part
        header = self.ranks[part]
        return Origin(self.parts[part].action, header.rank, header.host)

    @property
    def order(self) -> tuple[int, int]:
        """The stage and the tensor's position within its action."""
        record = self.parts[self.any_part]
        return record.stage, record.position


@dataclass
class _Run:
    """All ranks' records of a run."""

    files: list[RankFile]
    steps: dict[int, dict[_Key, _Tensor]]
    """The steps that all ranks have completed."""
    gap: str = ""
    """Which step is incomplete, was not recorded or did not run the configured schedule; empty if
    there is none."""

    @classmethod
    def read(cls, folder: Path, *, settings: str = "") -> _Run:
        """Read the records in a folder, like `read_folder`.

        Raises:
            DataError: The folder has no digests, damaged digests, or only some ranks' digests.
        """
        files = read_folder(folder, settings=settings)
        # A missing rank's tensors would count as tensors that the run never computed.
        num_ranks = files[0].header.num_ranks
        if len(files) < num_ranks:
            raise DataError(
                f"{folder} has digests of {len(files)} of {num_ranks} ranks; copy the other ranks' "
                "files into it, or record again in a folder that all hosts share"
            )
        # Files from an earlier run with more ranks may still be there.
        if any(file.header.num_ranks not in (0, len(files)) for file in files):
            raise DataError(
                f"{folder} has digests of several runs; record each run in a new folder"
            )
        steps_of_ranks = [set(file.steps) for file in files]
        common = set.intersection(*steps_of_ranks)
        longest = set.union(*steps_of_ranks)
        gap = _unrecorded(folder, files) or _other_schedule(folder, files)
        # A killed rank may be missing the last steps, so compare only
        # steps that all ranks have.
        if common != longest:
            gap = f"{folder}: not all ranks completed step {min(longest - common)}"
        steps = {number: _tensors(files, number) for number in sorted(common)}
        return cls(files, steps, gap)

    @cached_property
    def first_step(self) -> int:
        """The first training step; the initial weights are recorded before it."""
        trained = []
        # Before the first step, only weights are recorded.
        for number, tensors in self.steps.items():
            if any(kind == "forward" for kind, _, _ in tensors):
                trained.append(number)
        return min(trained, default=0)

    @property
    def header(self) -> Header:
        """The first rank's header."""
        return self.files[0].header

    @cached_property
    def buffers(self) -> set[frozenset[str]]:
        """The names of the weights in each stage on each rank. These weights share a buffer."""
        names_by_stage: dict[tuple[int, int], set[str]] = defaultdict(set)
        for file in self.files:
            for records in file.steps.values():
                for record in records:
                    is_repeated = record.module.endswith(FIRST_READING)
                    if record.kind == "weights" and not is_repeated:
                        stage = file.header.rank, record.stage
                        names_by_stage[stage].add(record.module)
        return {frozenset(names) for names in names_by_stage.values()}

    def names_in(self, steps: Collection[int]) -> set[tuple[Kind, str]]:
        """Return the kinds of tensors in the given steps, each with its module or parameter."""
        names: set[tuple[Kind, str]] = set()
        for step in steps:
            names.update((kind, module) for kind, _, module in self.steps[step])
        return names


def _unrecorded(folder: Path, files: Sequence[RankFile]) -> str:
    """Return why a rank did not record a step, or an empty text if all steps were recorded."""
    for file in files:
        if file.gap:
            return f"{folder}: {file.gap}"
    return ""


def _other_schedule(folder: Path, files: Sequence[RankFile]) -> str:
    """Return which step did not run the configured schedule, or an empty text if there is none."""
    for file in files:
        for step, schedule in sorted(file.schedules.items()):
            if schedule != file.header.schedule:
                return f"{folder}: step {step} ran {schedule} instead of {file.header.schedule}"
    return ""


def _tensors(files: Sequence[RankFile], step: int) -> dict[_Key, _Tensor]:
    parts: dict[_Key, dict[str, Record]] = defaultdict(dict)
    ranks: dict[_Key, dict[str, Header]] = defaultdict(dict)
    for file in files:
        for record in file.steps[step]:
            # Several stages may hold copies of a module under the same name,
            # such as the embedding for multi-token prediction or a tied
            # weight. Use the first stage's copy, so the result does not depend
            # on which ranks hold the copies.
            earlier = parts[record.key].get(record.part)
            if earlier is None or record.stage < earlier.stage:
                parts[record.key][record.part] = record
                ranks[record.key][record.part] = file.header
    return {key: _Tensor(parts[key], ranks[key]) for key in parts}


def _check_alignment(first: Header, second: Header) -> None:
    if first.balance != second.balance:
        raise DataError(
            "only one of the runs has --pipeline-balance, which numbers micro-batches by length; "
            "record both runs with it, or both without"
        )
    if first.loss_is_per_token != second.loss_is_per_token:
        raise DataError(
            "only one of the runs has --calculate-per-token-loss, which scales gradients "
            "differently; record both runs with it, or both without"
        )


# -- comparing -------------------------------------------------------------------------------------


class _Sized(Protocol):
    """A tensor with known norm and projections."""

    @property
    def norm(self) -> float: ...

    @property
    def projections(self) -> Sequence[float]: ...


def relative_difference(first: _Sized, second: _Sized) -> float:
    """Return the approximate norm of two tensors' difference, relative to the first's norm."""
    if not (math.isfinite(first.norm) and math.isfinite(second.norm)):
        return math.inf
    squares = 0.0
    projections = zip(first.projections, second.projections, strict=True)
    for projection, other_projection in projections:
        squares += (projection - other_projection) ** 2
    # Tensors are projected onto fixed vectors (`tracing/fingerprint.py`). The
    # root mean square of the projections' differences is an estimate of the norm
    # of the tensors' difference.
    distance = math.sqrt(squares / len(first.projections))
    if not first.norm:
        return math.inf if distance else 0.0
    return distance / first.norm


@dataclass(frozen=True)
class _Mismatch:
    """A tensor that differs and is a candidate for the first difference."""

    key: _Key
    order: tuple[int, int]
    reference: _Tensor | None
    candidate: _Tensor | None
    part: str | None = None
    relative: float | None = None
    tolerance: float = 0.0

    @property
    def place_in_step(self) -> tuple[int, ...]:
        """The sort key, which orders tensors by when a step computes them.

        The micro-batch comes last in the key, except for weight gradients, which accumulate over
        micro-batches.
        """
        kind, microbatch, _ = self.key
        stage, position = self.order
        phase = KINDS.index(kind)
        if kind == "forward":
            return phase, stage, position, microbatch
        if kind == "backward":
            return phase, -stage, position, microbatch
        if kind == "weight gradient":
            return phase, microbatch, -stage, position
        return phase, stage, position, microbatch


class _Tolerances(Protocol):
    """How much tensors may differ between two runs that sum in different orders."""

    @property
    def description(self) -> str: ...

    @property
    def steps(self) -> Collection[int] | None:
        """The steps that have tolerances, or None if all of them do."""

    def of(self, step: int, key: _Key) -> float:
        """Return the allowed relative difference for a tensor."""


class _StatedTolerances:
    """Fixed tolerances, for any single-precision model."""

    description = (
        f"the stated {STATED_TOLERANCE:g} of a tensor's norm, growing by a factor of {_GROWTH:g} "
        "with each later step"
    )

    steps = None

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step

    def of(self, step: int, _key: _Key) -> float:
        return STATED_TOLERANCE * _GROWTH ** max(step - self._first_step, 0)


class _Place(NamedTuple):
    """Identifies the tensors that share a learned tolerance."""

    step: int
    kind: Kind
    role: str
    """The module or parameter, without its layer number."""


class _LearnedTolerances:
    """Tolerances learned from a run with different rounding.

    All tensors of the same module share one tolerance across all layers and micro-batches.
    """

    def __init__(
        self,
        largest: Mapping[_Place, float],
        steps: Collection[int],
        folder: Path,
    ) -> None:
        self._largest = largest
        self.steps = steps
        self._folder = folder

    @classmethod
    def of_runs(cls, reference: _Run, folder: Path) -> _LearnedTolerances:
        """Learn tolerances from the digests in `folder`.

        Raises:
            DataError: The run did not use different rounding, or its ranks hold different tensors.
        """
        run = _Run.read(folder, settings=f" {ROUNDING}=1")
        if not run.header.rounded:
            raise DataError(
                f"{folder} was recorded without {ROUNDING}=1; record it again with {ROUNDING}=1"
            )
        # The largest relative difference in each place.
        largest: dict[_Place, float] = defaultdict(float)
        steps = set(reference.steps) & set(run.steps)
        for step in steps:
            for key, tensor in reference.steps[step].items():
                rounded_tensor = run.steps[step].get(key)
                if rounded_tensor is None or not _has_same_parts(
                    tensor, rounded_tensor
                ):
                    raise DataError(
                        f"{folder}: its ranks do not hold the same tensors as the reference's; "
                        "record it with the reference's flags"
                    )
                kind, _, name = key
                place = _Place(step, kind, _role(name))
                for part, record in tensor.parts.items():
                    rounded_record = rounded_tensor.parts[part]
                    relative = relative_difference(record, rounded_record)
                    # NaN, infinity or zero in either run says nothing about rounding.
                    if math.isfinite(relative):
                        largest[place] = max(largest[place], relative)
        return cls(dict(largest), steps, folder)

    @property
    def description(self) -> str:
        largest_tolerance = LEARNED_MARGIN * max(self._largest.values(), default=0.0)
        return (
            f"{LEARNED_MARGIN:g} times the differences of each module's tensors in {self._folder}, "
            f"at most {largest_tolerance:.2g} of a norm"
        )

    def of(self, step: int, key: _Key) -> float:
        kind, _, name = key
        place = _Place(step, kind, _role(name))
        learned = self._largest.get(place, 0.0)
        # Rounding does not affect the gradient of the loss, for example. A
        # tolerance of 0 would then require bitwise equality, but scaled
        # gradients are not bitwise equal.
        return max(LEARNED_MARGIN * learned, _RESOLUTION)


def _role(name: str) -> str:
    """Return the name of a module or parameter without its layer number."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    module = match["module"] or ""
    return f"{match['stack']}.{module}"


@dataclass
class _Comparing:
    """A comparison between two runs under given tolerances."""

    reference: _Run
    candidate: _Run
    tolerances: _Tolerances

    def result(self) -> Comparison:
        """Compare the steps that both runs have and stop after the first difference.

        Raises:
            DataError: The runs have no training step or no tensor in common.
        """
        common, gap = self._common_steps()
        notes = []
        learned_steps = self.tolerances.steps
        precision = self.reference.header.precision
        if self._tolerates and learned_steps is None and precision != "float32":
            notes.append(
                f"the stated tolerance is for float32, but the runs compute in {precision}; learn "
                f"one with compare --calibrate, or from a third folder recorded with {ROUNDING}=1"
            )
        is_trained = any(
            _is_trained(self.reference, step) and _is_trained(self.candidate, step)
            for step in common
        )
        # Differences spread to all later steps, so stop at the first step that has one.
        num_steps = 0
        num_tensors = 0
        difference = None
        for step in common:
            num_steps += 1
            reference_keys = set(self.reference.steps[step])
            candidate_keys = set(self.candidate.steps[step])
            num_tensors += len(reference_keys & candidate_keys)
            mismatches = list(self._mismatches(step))
            if mismatches:
                difference = self._chosen(step, mismatches)
                break
            gap = gap or self._not_finite(step)
        # Without common tensors, finding no difference would mean nothing.
        if difference is None and not num_tensors:
            raise DataError(
                "the two runs have no tensor in common, so nothing was compared; record both with "
                f"{VARIABLE} alone, or set {OPERATORS} to a module that both run"
            )
        # For example, a run that ended during its first step has
        # only its initial weights.
        if difference is None and not is_trained:
            raise DataError(
                "the two runs have no complete training step in common, only weights; record both "
                "again from the same iteration until both have completed a step"
            )
        schedules = (
            self.reference.header.schedule,
            self.candidate.header.schedule,
        )
        return Comparison(
            difference,
            num_steps,
            num_tensors,
            self._tolerance_text,
            notes=(*notes, *self._unmatched(common)),
            gap=gap,
            schedules=schedules,
        )

    def _common_steps(self) -> tuple[list[int], str]:
        """Return the steps to compare, and the reason if their equality proves nothing.

        Raises:
            DataError: The runs have no step in common.
        """
        reference_steps = set(self.reference.steps)
        candidate_steps = set(self.candidate.steps)
        common = sorted(reference_steps & candidate_steps)
        if not common:
            raise DataError(
                "the two runs have no complete step in common; record them again"
            )
        gap = self.reference.gap or self.candidate.gap
        # Equality in common steps says nothing about a step that only one run has.
        if reference_steps != candidate_steps:
            num_in_reference = len(reference_steps)
            num_in_candidate = len(candidate_steps)
            gap = gap or (
                f"the runs have {num_in_reference} and {num_in_candidate} steps, of which they "
                f"share {len(common)}; record both for the same steps"
            )
        learned_steps = self.tolerances.steps
        # Of these, compare only the steps for which tolerances were learned.
        if self._tolerates and learned_steps is not None:
            num_unlearned = len(set(common) - set(learned_steps))
            common = [step for step in common if step in learned_steps]
            if not common:
                raise DataError(
                    "the run to learn tolerances from has none of the other two runs' steps; "
                    "record it again with as many steps"
                )
            if num_unlearned:
                gap = gap or (
                    f"the run to learn tolerances from lacks {num_unlearned} steps, which were not "
                    "compared"
                )
        return common, gap

    def _not_finite(self, step: int) -> str:
        """Describe the first output or weight that is not finite in both runs; empty if none is."""
        candidates = self.candidate.steps[step]
        places = []
        for key, tensor in self.reference.steps[step].items():
            # Ignore gradients: in half precision they may overflow, in which case the
            # optimizer skips the step.
            kind = key[0]
            if kind not in ("forward", "weights") or key not in candidates:
                continue
            other_tensor = candidates[key]
            if not (tensor.is_finite or other_tensor.is_finite):
                places.append(_Mismatch(key, tensor.order, tensor, other_tensor))
        if not places:
            return ""
        first = self._chosen(step, places)
        return f"{first.tensor} is not finite in both runs ({first.moment})"

    def _unmatched(self, steps: Sequence[int]) -> Iterator[str]:
        """For each run, yield a note about the modules and parameters that only it has."""
        in_reference = self.reference.names_in(steps)
        in_candidate = self.candidate.names_in(steps)
        unmatched_by_run = {
            "reference": in_reference - in_candidate,
            "candidate": in_candidate - in_reference,
        }
        for label, unmatched in unmatched_by_run.items():
            if unmatched:
                kind, module = min(unmatched)
                yield (
                    f"not compared: {len(unmatched)} kinds of tensors that only the {label} has, "
                    f"such as {kind} of {module}"
                )

    def _mismatches(self, step: int) -> Iterator[_Mismatch]:
        references = self.reference.steps[step]
        candidates = self.candidate.steps[step]
        for key, tensor in references.items():
            if key in candidates:
                yield from self._compared(step, key, tensor, candidates[key])
        # A tensor that only one run computed also counts as a difference.
        yield from self._never_computed(references, candidates)

    def _compared(
        self,
        step: int,
        key: _Key,
        reference: _Tensor,
        candidate: _Tensor,
    ) -> Iterator[_Mismatch]:
        """Yield a mismatch if a tensor differs."""
        kind = key[0]
        if self._replicas_differ:
            if kind == "weight gradient":
                # Ranks sum over different micro-batches or tokens, so only
                # reduced gradients can match.
                return
            if kind == "backward":
                # The two runs divide a micro-batch's gradients by different numbers.
                candidate = candidate.scaled(self._gradient_scale)
        tolerance = self._tolerance(step, key)
        if not _has_same_parts(reference, candidate):
            relative = _difference_of_norms(reference, candidate)
            # Norms computed from parts are rounded differently even if
            # all elements are identical.
            tolerance = max(tolerance, STATED_TOLERANCE)
            if relative is not None and not relative <= tolerance:
                yield _Mismatch(
                    key,
                    reference.order,
                    reference,
                    candidate,
                    tolerance=tolerance,
                )
            return
        for part, record in sorted(reference.parts.items()):
            other_record = candidate.parts[part]
            if record.bits == other_record.bits:
                continue
            relative = relative_difference(record, other_record)
            # Written this way, the condition also holds for NaN.
            if not tolerance or not relative <= tolerance:
                yield _Mismatch(
                    key,
                    reference.order,
                    reference,
                    candidate,
                    part,
                    relative,
                    tolerance,
                )
                return

    @property
    def _replicas_differ(self) -> bool:
        """Whether the two runs' ranks sum gradients over different shares of a batch."""
        first = self.reference.header
        second = self.candidate.header
        first_sizes = first.data_size, first.context_size
        second_sizes = second.data_size, second.context_size
        return first_sizes != second_sizes

    @cached_property
    def _order_depends_on_placement(self) -> bool:
        """Whether replicas sum gradients in a different order in the two runs.

        Gloo sums different parts of a buffer in different orders, as do NCCL's rings (not tested),
        and the placement of stages determines which weights share a buffer. With two replicas, the
        order does not matter.
        """
        header = self.reference.header
        num_replicas = header.data_size * header.context_size
        if self._replicas_differ or num_replicas < 3:
            return False
        return self.reference.buffers != self.candidate.buffers

    @property
    def _gradient_scale(self) -> float:
        """The factor that makes a candidate's micro-batch gradients match the reference's.

        Megatron averages gradients over data- and context-parallel ranks, because each rank divides
        a micro-batch's loss by its own number of micro-batches and of tokens. With a per-token
        loss, Megatron instead sums the gradients and divides by the total number of tokens at the
        end of the step.
        """
        first = self.reference.header
        second = self.candidate.header
        if first.loss_is_per_token:
            return 1.0
        num_averaged_first = first.data_size * first.context_size
        num_averaged_second = second.data_size * second.context_size
        return num_averaged_first / num_averaged_second

    def _never_computed(
        self,
        references: Mapping[_Key, _Tensor],
        candidates: Mapping[_Key, _Tensor],
    ) -> Iterator[_Mismatch]:
        """Yield the tensors of individual micro-batches that only one of the runs computed.

        Modules that one run never records are skipped. For example, Megatron's schedule plans call
        parts of layers, so whole layers are not recorded.
        """
        both_ways = (references, candidates), (candidates, references)
        for tensors, tensors_of_other in both_ways:
            # Modules that the other run recorded for at least one micro-batch.
            recorded = {(kind, module) for kind, _, module in tensors_of_other}
            for key, tensor in tensors.items():
                if key in tensors_of_other:
                    continue
                kind, microbatch, module = key
                is_by_microbatch = (
                    microbatch != NO_MICROBATCH and kind != "weight gradient"
                )
                if not is_by_microbatch or (kind, module) not in recorded:
                    continue
                if tensors is references:
                    yield _Mismatch(key, tensor.order, tensor, None)
                else:
                    yield _Mismatch(key, tensor.order, None, tensor)

    def _tolerance(self, step: int, key: _Key) -> float:
        """Return the allowed relative difference for a tensor, or 0 if it must be bit-identical."""
        kind = key[0]
        if not self._may_differ(step, kind):
            return 0.0
        return self.tolerances.of(step, key)

    @cached_property
    def _reason_for_all(self) -> str:
        """Why the runs sum all tensors in different orders, or empty if they do not."""
        first = self.reference.header
        second = self.candidate.header
        for name, description in _SIZES.items():
            first_size = getattr(first, name)
            second_size = getattr(second, name)
            if first_size != second_size:
                return f"the runs have {first_size} and {second_size} {description}"
        for description in sorted(first.summation.keys() | second.summation.keys()):
            first_setting = first.summation.get(description)
            second_setting = second.summation.get(description)
            if first_setting is None or second_setting is None:
                setting = first_setting or second_setting
                return f"only one of the runs has {setting} {description}"
            if first_setting != second_setting:
                return (
                    f"the runs have {first_setting} and {second_setting} {description}"
                )
        # With mirrored pipelines, the order in which experts sum over tokens depends on
        # which twin each token is routed to.
        if first.routing != second.routing and first.expert_size > 1:
            return "mirrored pipelines' experts sum over tokens in a different order"
        return ""

    def _may_differ(self, step: int, kind: Kind) -> bool:
        """Return whether the two runs sum in different orders for this kind of tensor."""
        if self._reason_for_all:
            return True
        first_step = self.reference.first_step
        if self._order_depends_on_placement:
            is_summed = kind in ("reduced gradient", "weights")
            return step > first_step or (step == first_step and is_summed)
        if not self._replicas_differ:
            return False
        # Forward passes in the first step precede any sum over replicas, so they must
        # be bit-identical. Backward passes also precede these sums, but their
        # gradients are scaled differently.
        is_before_sums = step < first_step or (step == first_step and kind == "forward")
        return not is_before_sums

    @property
    def _tolerates(self) -> bool:
        """Whether any tensors may differ."""
        return bool(
            self._reason_for_all
            or self._replicas_differ
            or self._order_depends_on_placement
        )

    @property
    def _tolerance_text(self) -> str:
        reason = self._reason_for_all
        if not reason and self._replicas_differ:
            first_size = self.reference.header.data_size
            second_size = self.candidate.header.data_size
            reason = f"the runs have {first_size} and {second_size} replicas"
        elif not reason and self._order_depends_on_placement:
            reason = ORDER_OF_REPLICAS
        if not self._tolerates:
            return "none, all bits must be equal"
        return f"{self.tolerances.description}, because {reason}"

    def _chosen(self, step: int, mismatches: Sequence[_Mismatch]) -> Difference:
        """Return the first mismatch in a step."""
        first = min(mismatches, key=lambda mismatch: mismatch.place_in_step)
        kind, microbatch, name = first.key
        numbers: set[int] = set()
        if kind == "weight gradient":
            # Sums after later micro-batches include this micro-batch, so they differ too.
            numbers = {microbatch}
        elif microbatch != NO_MICROBATCH:
            # Collect all micro-batches in which this tensor differs.
            for mismatch in mismatches:
                other_kind, other_microbatch, other_name = mismatch.key
                if (other_kind, other_name) == (kind, name):
                    numbers.add(other_microbatch)
        match = LAYER.fullmatch(name)
        layer = None
        module = name
        # Only the main stack's layers are numbered from the model's first layer.
        if match is not None and match["stack"] in ("decoder.layers", "encoder.layers"):
            layer = int(match["number"])
            module = match["module"] or ""
        reference = None
        if first.reference is not None:
            reference = first.reference.origin(first.part)
        candidate = None
        if first.candidate is not None:
            candidate = first.candidate.origin(first.part)
        return Difference(
            iteration=step,
            microbatches=tuple(sorted(numbers)),
            num_microbatches=self._num_microbatches(step),
            kind=kind,
            layer=layer,
            module=module,
            name=name,
            reference=reference,
            candidate=candidate,
            relative=first.relative,
            tolerance=first.tolerance,
        )

    def _num_microbatches(self, step: int) -> int:
        keys = (*self.reference.steps[step], *self.candidate.steps[step])
        return 1 + max(microbatch for _, microbatch, _ in keys)


def _is_trained(run: _Run, step: int) -> bool:
    """Return whether a run trained in a step, as opposed to only recording its initial weights."""
    return any(kind != "weights" for kind, _, _ in run.steps[step])


def _has_same_parts(first: _Tensor, second: _Tensor) -> bool:
    if first.parts.keys() != second.parts.keys():
        return False
    for part, record in first.parts.items():
        if record.num_elements != second.parts[part].num_elements:
            return False
    return True


def _difference_of_norms(first: _Tensor, second: _Tensor) -> float | None:
    """Return the relative difference between the norms of tensors that the runs split differently.

    Return None if the norms cannot be compared, because the parts are neither a split nor copies.
    """
    sizes_of_parts = []
    for tensor in (first, second):
        sizes_of_parts.append([record.num_elements for record in tensor.parts.values()])
    counts = [sum(sizes) for sizes in sizes_of_parts]
    norms = []
    for tensor in (first, second):
        squares = [record.norm**2 for record in tensor.parts.values()]
        norms.append(math.sqrt(sum(squares)))
    if counts[0] != counts[1]:
        # The parts may be copies of the tensor, such as one per replica. The norm of n
        # copies together is sqrt(n) times the norm of one.
        for index, sizes in enumerate(sizes_of_parts):
            may_be_copies = len(set(sizes)) == 1
            if not may_be_copies:
                return None
            norms[index] /= math.sqrt(len(sizes))
            counts[index] //= len(sizes)
        if counts[0] != counts[1]:
            return None
    if not norms[0]:
        return math.inf if norms[1] else 0.0
    return abs(norms[1] - norms[0]) / norms[0]
