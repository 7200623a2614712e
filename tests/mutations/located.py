"""Plants each silent fault, and prints where the comparison of digests locates it.

    python -m tests.mutations.located [WORDS OF A NAME]
    python -m tests.mutations.located --mutants [WORDS OF A NAME]

With `--mutants` it plants the mutants of the runtime (`mutants.py`) in several trainings. Some of
them raise an error there, or change no numbers. Whether numbers change is decided without digests,
by the weights after the last step.

All faults for the same world of ranks run in the same processes, one after the other. A fault that
ends them counts as an error, and the others continue in new processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.tools.compare.locate import Difference, locate
from tests.mutations.mutants import MUTANTS
from tests.mutations.silent_faults import (
    FAULTS,
    SETTINGS,
    Fault,
    Setting,
    text,
    together,
    with_other_use,
    with_saliency,
)
from tests.ranks import start_ranks
from tests.runtime.capture import named_weights
from tests.tracing import recorded
from tests.tracing.recorded import Change, Training, unchanged

_NO_FAULT = "no fault, "
_MUTANT = "mutant: "
MUTANT_SETTINGS = ("zb-h1", "zb-v", "recompute", "overlap", "dynamic", "bitpipe")
"""Trainings in which each mutant is planted."""
_MUTANT_MODEL = together(with_other_use(1, "mlp.linear_fc1.weight"), with_saliency(2))
"""The model of these trainings has what some mutants compute wrongly."""
_MUTANT_TIMEOUT_S = 20.0
"""Time-out of messages with a mutant, some of which lose messages."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of planting a fault."""

    fault: Fault
    difference: Difference | None
    changes_weights: bool = False
    """Whether the weights after the last step are not those of the reference."""
    error: str = ""

    @property
    def is_missed(self) -> bool:
        """Whether numbers changed and no difference was detected."""
        return self.changes_weights and not self.is_detected

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
        verdict = "equal"
        if self.error:
            verdict = "error"
        elif self.is_missed:
            verdict = "MISSED"
        elif self.is_detected:
            verdict = "located" if self.is_located else "detected"
        outcome = self.error or (
            self.difference.sentence() if self.difference else "no difference"
        )
        return f"{verdict:9}{self.fault.name} ({self.fault.setting}): {outcome}"


def no_fault(setting: str) -> Fault:
    """Return a fault that changes nothing, so that any detection is a false alarm."""
    return Fault(_NO_FAULT + setting, setting, unchanged, "forward")


def mutants() -> list[Fault]:
    """Return the mutants of the runtime in each of `MUTANT_SETTINGS`."""
    return [
        _mutant(mutant.name, name) for mutant in MUTANTS for name in MUTANT_SETTINGS
    ]


def _mutant(name: str, setting: str) -> Fault:
    return Fault(
        name=f"{_MUTANT}{name}, {setting}",
        setting=setting,
        plant=together(_MUTANT_MODEL, text(name)),
        kind="forward",
        reference=_MUTANT_MODEL,
    )


def _named(name: str) -> Fault:
    if name.startswith(_NO_FAULT):
        return no_fault(name.removeprefix(_NO_FAULT))
    if name.startswith(_MUTANT):
        mutant_name, _, setting = name.removeprefix(_MUTANT).rpartition(", ")
        return _mutant(mutant_name, setting)
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
        num_layers=setting.num_layers,
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
            _train(_training(setting, None, place), fault.reference)
        training = _training(setting, setting.schedule, Path(folder) / name)
        if name.startswith(_MUTANT):
            settings = {**training.settings, "message_timeout_s": _MUTANT_TIMEOUT_S}
            training = replace(training, settings=settings)
        _train(training, fault.plant)


def _train(training: Training, change: Change) -> None:
    """Train as one rank, and write digests of its weights beside those of its tensors."""
    from torch import distributed

    with recorded.built(training) as (build, chunks), change(chunks):
        for number in range(training.num_steps):
            recorded.step(training, build, chunks, number)
        weights = {}
        for name, parameter in named_weights(chunks):
            content = parameter.detach().numpy().tobytes()
            weights[name] = hashlib.sha256(content).hexdigest()
        path = Path(training.folder, f"weights-{distributed.get_rank()}.json")
        path.write_text(json.dumps(weights))


def _weights(folder: Path) -> dict[str, set[str]]:
    """Return the digests that all ranks have of each weight."""
    digests: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("weights-*.json"):
        for name, digest in json.loads(path.read_text()).items():
            digests[name].add(digest)
    return digests


def _reference_of(fault: Fault, folder: Path) -> Path:
    if fault.reference is unchanged:
        return folder / f"reference of {fault.setting}"
    if fault.reference is _MUTANT_MODEL:
        return folder / f"reference of mutants, {fault.setting}"
    return folder / f"reference of {fault.name}"


def run(faults: Sequence[Fault], folder: Path) -> list[Outcome]:
    """Plant faults, in as few worlds of ranks as possible; return the outcome of each."""
    outcomes = []
    for size in sorted({SETTINGS[fault.setting].world_size for fault in faults}):
        waiting = [
            fault for fault in faults if SETTINGS[fault.setting].world_size == size
        ]
        world = 0
        while waiting:
            world += 1
            place = folder / f"{size}-{world}"
            place.mkdir()
            under_way = place / "under way"
            names = [fault.name for fault in waiting]
            under_way.write_text(names[0])
            ended = start_ranks(
                size,
                _train_all,
                str(place),
                names,
                str(under_way),
                timeout_s=60 + 30 * len(names),
            )
            has_failed = any(code != 0 for code in ended.exit_codes)
            last = under_way.read_text() if has_failed else names[-1]
            number = names.index(last)
            for fault in waiting[: number if has_failed else number + 1]:
                reference = _reference_of(fault, place)
                difference = locate(reference, place / fault.name)
                changes_weights = _weights(reference) != _weights(place / fault.name)
                outcomes.append(Outcome(fault, difference, changes_weights))
            if has_failed:
                reason = ended.describe()[-500:]
                outcomes.append(Outcome(waiting[number], None, error=reason))
            waiting = waiting[number + 1 :]
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the counts on one line."""
    num_detected = sum(outcome.is_detected for outcome in outcomes)
    num_located = sum(outcome.is_located for outcome in outcomes)
    num_changing = sum(outcome.changes_weights for outcome in outcomes)
    num_missed = sum(outcome.is_missed for outcome in outcomes)
    return (
        f"{len(outcomes)} faults: {num_changing} change weights; {num_detected} detected, "
        f"{num_located} located, {num_missed} missed"
    )


def main() -> int:
    """Run the faults whose names contain all words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    faults = mutants() if args.mutants else FAULTS
    chosen = [
        fault for fault in faults if all(word in fault.name for word in args.words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(chosen, Path(folder))
    for outcome in outcomes:
        print(outcome.line())
    print(summary(outcomes))
    if args.mutants:
        return int(any(outcome.is_missed for outcome in outcomes))
    return int(not all(outcome.is_detected for outcome in outcomes))


if __name__ == "__main__":
    from tests.mutations import (
        located,  # ranks find what they run by the name of its module
    )

    raise SystemExit(located.main())
