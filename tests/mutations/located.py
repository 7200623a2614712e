"""Plants each silent fault, and prints where the comparison of digests locates it.

    python -m tests.mutations.located [WORDS OF A NAME]

All faults for the same world of ranks run in the same processes, one after the other. A fault that
ends them counts as an error, and the others continue in new processes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.tools.compare.locate import Difference, locate
from tests.mutations.silent_faults import FAULTS, SETTINGS, Fault, Setting
from tests.ranks import start_ranks
from tests.tracing.recorded import Training, train, unchanged

_NO_FAULT = "no fault, "


@dataclass(frozen=True)
class Outcome:
    """The outcome of planting a fault."""

    fault: Fault
    difference: Difference | None
    error: str = ""

    @property
    def is_detected(self) -> bool:
        """Whether a difference in the numbers was detected."""
        return self.difference is not None

    @property
    def is_located(self) -> bool:
        """Whether the first difference was found where the fault is."""
        fault, difference = self.fault, self.difference
        if difference is None or difference.candidate is None:
            return False
        return (
            (difference.kind, difference.iteration) == (fault.kind, fault.iteration)
            and (fault.layer is None or difference.layer == fault.layer)
            and difference.module.startswith(fault.module)
            and (not fault.action or difference.candidate.action == fault.action)
        )

    def line(self) -> str:
        """Return the outcome as a readable line."""
        verdict = "located" if self.is_located else "detected" if self.is_detected else "MISSED"
        what = self.error or (self.difference.sentence() if self.difference else "no difference")
        return f"{verdict:9}{self.fault.name} ({self.fault.setting}): {what}"


def no_fault(setting: str) -> Fault:
    """Return a fault that changes nothing, so that any detection is a false alarm."""
    return Fault(_NO_FAULT + setting, setting, unchanged, "forward")


def _named(name: str) -> Fault:
    if name.startswith(_NO_FAULT):
        return no_fault(name.removeprefix(_NO_FAULT))
    [fault] = [fault for fault in FAULTS if fault.name == name]
    return fault


def _training(setting: Setting, schedule: str | None, folder: Path) -> Training:
    return Training(
        str(folder),
        schedule,
        world_size=setting.world_size,
        settings=setting.settings,
        model=setting.model,
        reduction=setting.reduction,
        seed=setting.seed,
        **(setting.shape if schedule is not None else {}),
    )


def _train_all(folder: str, names: Sequence[str], done: str) -> None:
    """Train references and faults as one rank; a file says which one is running."""
    trained: set[tuple[str, Any]] = set()
    for name in names:
        fault = _named(name)
        setting = SETTINGS[fault.setting]
        Path(done).write_text(name)
        place = _reference_of(fault, Path(folder))
        if (str(place), fault.reference) not in trained:
            trained.add((str(place), fault.reference))
            train(_training(setting, None, place), fault.reference)
        train(_training(setting, setting.schedule, Path(folder) / name), fault.plant)


def _reference_of(fault: Fault, folder: Path) -> Path:
    if fault.reference is unchanged:
        return folder / f"reference of {fault.setting}"
    return folder / f"reference of {fault.name}"


def run(faults: Sequence[Fault], folder: Path) -> list[Outcome]:
    """Plant faults, in as few worlds of ranks as possible; return the outcome of each."""
    outcomes = []
    for size in sorted({SETTINGS[fault.setting].world_size for fault in faults}):
        waiting = [fault for fault in faults if SETTINGS[fault.setting].world_size == size]
        world = 0
        while waiting:
            world += 1
            place = folder / f"{size}-{world}"
            place.mkdir()
            under_way = place / "under way"
            names = [fault.name for fault in waiting]
            under_way.write_text(names[0])
            ended = start_ranks(
                size, _train_all, str(place), names, str(under_way), timeout_s=60 + 30 * len(names)
            )
            has_failed = any(code != 0 for code in ended.exit_codes)
            last = under_way.read_text() if has_failed else names[-1]
            number = names.index(last)
            for fault in waiting[: number if has_failed else number + 1]:
                difference = locate(_reference_of(fault, place), place / fault.name)
                outcomes.append(Outcome(fault, difference))
            if has_failed:
                outcomes.append(Outcome(waiting[number], None, ended.describe()[-500:]))
            waiting = waiting[number + 1 :]
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the counts on one line."""
    num_detected = sum(outcome.is_detected for outcome in outcomes)
    num_located = sum(outcome.is_located for outcome in outcomes)
    return f"{len(outcomes)} faults: {num_detected} detected, {num_located} located"


def main() -> int:
    """Run the faults whose names contain all words of the command line."""
    faults = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(faults, Path(folder))
    for outcome in outcomes:
        print(outcome.line())
    print(summary(outcomes))
    return 0 if all(outcome.is_detected for outcome in outcomes) else 1


if __name__ == "__main__":
    from tests.mutations import located  # ranks find what they run by the name of its module

    raise SystemExit(located.main())
