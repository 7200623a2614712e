"""Finds the first operator inside a module that differs between two recorded training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import DataError
from megatron_ext.tools.compare.locate import LAYER, relative_difference
from megatron_ext.tracing.digest_files import OPERATORS
from megatron_ext.tracing.operator_files import Operator, Place, read_folder

if TYPE_CHECKING:
    from megatron_ext.tools.compare.locate import Difference

_MAX_LISTED = 4


def place_of(difference: Difference) -> Place | None:
    """Return where to record operators for a difference, or None if no module computed it."""
    kind = difference.kind
    if kind not in ("forward", "backward") or difference.is_of_whole_model:
        return None
    if difference.reference is None or difference.candidate is None:
        return None
    match = LAYER.fullmatch(difference.name)
    # Record the whole layer, because operators that run before one of its modules, such
    # as a norm, have no digests of their own but may have caused the difference.
    module = difference.name if match is None else f"{match['stack']}.{match['number']}"
    return Place(difference.iteration, difference.microbatches[0], kind, module)


@dataclass(frozen=True)
class OperatorComparison:
    """The result of comparing a module's operators in two runs."""

    sentence: str
    """A sentence that names the first operator that differs, or says that none does."""
    are_equal: bool


def first_operator(
    reference: Path, candidate: Path, tolerance: float = 0.0
) -> OperatorComparison:
    """Find the first operator that differs.

    Operators are matched by name and shapes, in order, because the two runs may not run the same
    operators: a schedule that splits backward passes runs fewer in the same module.

    Args:
        reference: Folder with one run's operators.
        candidate: Folder with the other run's operators.
        tolerance: The largest relative difference in a result to ignore.

    Raises:
        DataError: A folder has no operators, or the folders belong to different modules.
    """
    # Only operators of the same module, on ranks with the same shards, can be compared.
    first_run = read_folder(reference)
    second_run = read_folder(candidate)
    places: set[str] = set()
    for folder, run in ((reference, first_run), (candidate, second_run)):
        if not run:
            raise DataError(
                f"{folder} has no operators: the module did not run as a whole, or {OPERATORS} was "
                "unset; record both runs again, for a module that both run"
            )
        places.update(file.header.place for file in run.values())
    if len(places) > 1:
        raise DataError(
            f"the folders have operators from different places, {' and '.join(sorted(places))}; "
            "record both runs for the same place"
        )
    if first_run.keys() != second_run.keys():
        raise DataError(
            "the runs have different numbers of tensor- or context-parallel ranks, so results "
            "have different shapes; record both with the same numbers"
        )
    place = Place.parsed(places.pop())
    where = f"in the {place.direction} pass of {place.module}"
    # Compare rank by rank, because every rank holds a different shard of the module.
    num_matches = 0
    for ranks, file in sorted(first_run.items()):
        matches = _Matches(file.operators, second_run[ranks].operators)
        description = matches.first_difference(tolerance)
        if description:
            sentence = f"first operator that differs {where}: {description}"
            return OperatorComparison(sentence, are_equal=False)
        num_matches += matches.count
    if not num_matches:
        raise DataError(
            f"neither run has operators {where}; record both for a module that computes"
        )
    sentence = (
        f"none of the {num_matches} operators that both runs have {where} differs"
    )
    return OperatorComparison(sentence, are_equal=True)


class _Matches:
    """A rank's operators in two runs, matched in order by name and shapes."""

    def __init__(self, first: Sequence[Operator], second: Sequence[Operator]) -> None:
        self._first = first
        self._second = second
        self.count = 0
        """Number of matches compared so far."""

    def first_difference(self, tolerance: float) -> str:
        """Describe the first match that differs, or return an empty text if none does.

        Operators that only one run has are ignored if a match with identical results follows.
        """
        first, second = self._first, self._second
        first_keys = [operator.text for operator in first]
        second_keys = [operator.text for operator in second]
        only_reference: list[Operator] = []
        only_candidate: list[Operator] = []
        # By default, `SequenceMatcher` never matches frequent items, such as additions,
        # in sequences of 200 items or more.
        matcher = SequenceMatcher(None, first_keys, second_keys, autojunk=False)
        last_reference: Sequence[Operator] = ()
        last_candidate: Sequence[Operator] = ()
        for (
            tag,
            first_begin,
            first_end,
            second_begin,
            second_end,
        ) in matcher.get_opcodes():
            last_reference = last_candidate = ()
            # Remember unmatched operators, because they may have caused the next difference.
            if tag != "equal":
                last_reference = first[first_begin:first_end]
                last_candidate = second[second_begin:second_end]
                only_reference += last_reference
                only_candidate += last_candidate
                continue
            for index in range(first_begin, first_end):
                operator = first[index]
                other = second[second_begin + index - first_begin]
                self.count += 1
                if operator.bits == other.bits:
                    # Identical results prove that the unmatched operators
                    # before them changed nothing.
                    only_reference.clear()
                    only_candidate.clear()
                    continue
                relative = relative_difference(operator, other)
                # Keep the unmatched operators, because they may have caused this difference.
                if tolerance and relative <= tolerance:
                    continue
                amount = (
                    f"by {relative:.2g} of its norm" if relative else "in its last bits"
                )
                return (
                    f"{operator.text}, number {index + 1} of {len(first)}, differs {amount}"
                    f"{_only('reference', only_reference)}{_only('candidate', only_candidate)}"
                )
        if last_reference or last_candidate:
            after = (
                "after the last operator of both"
                if self.count
                else "no operator is in both"
            )
            # No match follows these operators, so there is no way to tell
            # if they change the result.
            return (
                after
                + _only("reference", last_reference[:_MAX_LISTED], "")
                + _only("candidate", last_candidate[:_MAX_LISTED], "")
            )
        return ""


def _only(run: str, operators: Sequence[Operator], where: str = "before it, ") -> str:
    """Return the part of a sentence about the operators that only one run has."""
    if not operators:
        return ""
    # List the last ones, which are closest to the difference.
    names = ", ".join(operator.text for operator in operators[-_MAX_LISTED:])
    return f"; {where}only the {run} ran {names}"
