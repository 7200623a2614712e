"""Finds the first operator inside a module that differs between two recorded trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import DataError
from megatron_ext.tools.compare.locate import LAYER, relative_difference
from megatron_ext.tracing.operator_files import Operator, Place, read_folder

if TYPE_CHECKING:
    from megatron_ext.tools.compare.locate import Difference

_MAX_LISTED = 4


def place_of(difference: Difference) -> Place | None:
    """Return where to look for the operator of a difference; None: it is not inside a module."""
    kind = difference.kind
    if kind not in ("forward", "backward") or difference.name == "model":
        return None
    if difference.reference is None or difference.candidate is None:
        return None
    match = LAYER.fullmatch(difference.name)
    # The whole layer: what precedes a part, such as a norm, has no digests.
    module = difference.name if match is None else f"{match['stack']}.{match['number']}"
    return Place(difference.iteration, difference.microbatches[0], kind, module)


@dataclass(frozen=True)
class OperatorComparison:
    """The operators of two runs in one module, compared."""

    sentence: str
    """The first operator that differs, or that none does."""
    are_equal: bool


def first_operator(reference: Path, candidate: Path, tolerance: float = 0.0) -> OperatorComparison:
    """Find the first operator that differs.

    Operators are paired by name and shapes, in order: a schedule that splits backwards runs fewer
    of them in the same module.

    Args:
        reference: Folder of the operators of one run.
        candidate: Folder of the other run.
        tolerance: The largest relative difference of a result that does not count.

    Raises:
        DataError: A folder has no operators, or the two are of different places.
    """
    runs = [read_folder(folder) for folder in (reference, candidate)]
    for folder, run in zip((reference, candidate), runs, strict=True):
        if not run:
            raise DataError(f"{folder} has no operators: the module did not run as a whole")
    first_run, second_run = runs
    places = {file.header.place for run in runs for file in run.values()}
    if len(places) > 1:
        raise DataError(
            f"the folders have operators of different places, {' and '.join(sorted(places))}; "
            "record both for the same one"
        )
    if first_run.keys() != second_run.keys():
        raise DataError("the runs have different numbers of tensor-parallel ranks")
    place = Place.parsed(places.pop())
    where = f"in the {place.direction} of {place.module}"
    num_pairs = 0
    for tensor_rank, file in sorted(first_run.items()):
        pairs = _Pairs(file.operators, second_run[tensor_rank].operators)
        description = pairs.first_difference(tolerance)
        if description:
            sentence = f"first operator that differs {where}: {description}"
            return OperatorComparison(sentence, are_equal=False)
        num_pairs += pairs.count
    sentence = f"none of the {num_pairs} operators that both runs have {where} differs"
    return OperatorComparison(sentence, are_equal=True)


class _Pairs:
    """The operators of a rank in two runs, paired by name and shapes, in order."""

    def __init__(self, first: Sequence[Operator], second: Sequence[Operator]) -> None:
        self._first = first
        self._second = second
        self.count = 0
        """Pairs so far."""

    def first_difference(self, tolerance: float) -> str:
        """Return a description of the first pair that differs; empty: none does."""
        first, second = self._first, self._second
        first_keys = [operator.text for operator in first]
        second_keys = [operator.text for operator in second]
        only_reference: list[Operator] = []
        only_candidate: list[Operator] = []
        matcher = SequenceMatcher(None, first_keys, second_keys, autojunk=False)
        for tag, first_begin, first_end, second_begin, second_end in matcher.get_opcodes():
            if tag != "equal":
                only_reference += first[first_begin:first_end]
                only_candidate += second[second_begin:second_end]
                continue
            for index in range(first_begin, first_end):
                operator = first[index]
                other = second[second_begin + index - first_begin]
                self.count += 1
                if operator.bits == other.bits:
                    only_reference.clear()
                    only_candidate.clear()
                    continue
                relative = relative_difference(operator, other)
                if tolerance and relative <= tolerance:
                    continue
                amount = f"by {relative:.2g} of its norm" if relative else "in its last bits"
                return (
                    f"{operator.text}, number {index + 1} of {len(first)}, differs {amount}"
                    f"{_only('reference', only_reference)}{_only('candidate', only_candidate)}"
                )
        return ""


def _only(run: str, operators: Sequence[Operator]) -> str:
    """Return the part of a sentence about operators before the first one that only one run has."""
    if not operators:
        return ""
    names = ", ".join(operator.text for operator in operators[-_MAX_LISTED:])
    return f"; before it, only the {run} ran {names}"
