"""Splits a command line into the flags shared by all runs and the flags that a candidate adds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.flags import WordParser, add_arguments
from megatron_ext.errors import ArgumentsError

REFERENCE = "Megatron's own"
_SHARED = frozenset(
    {"--device-backend", "--microbatch-rng", "--variable-seq-lengths", "--hang-timeout"}
)
"""This package's flags that do not change how the pipeline runs. All runs share them."""
_SCHEDULE = "--pipeline-schedule"

_LEFT_OUT = {
    "--save": "no run writes to your checkpoints",
    "--save-interval": "",
    "--save-retain-interval": "",
    "--async-save": "",
    "--non-persistent-ckpt-type": "a run would load them instead of the common weights",
    "--non-persistent-save-interval": "",
    "--non-persistent-global-ckpt-dir": "",
    "--non-persistent-local-ckpt-dir": "",
    "--non-persistent-local-ckpt-algo": "",
    "--replication": "",
    "--replication-jump": "",
    "--replication-factor": "",
    "--exit-interval": "--steps sets the length of each run",
    "--exit-duration-in-mins": "--steps sets the length of each run",
    "--tensorboard-dir": "no run writes to your TensorBoard",
    "--wandb-project": "no run writes to your W&B",
    "--ext-list-patches": "",
    "--trace": "compare traces each run itself",
    "--trace-interval": "",
    "--trace-iterations": "",
    "--trace-dir": "",
}
"""Flags removed from all runs -> the reason to report, or empty to report nothing."""
_WEIGHTS = frozenset({"--load", "--ckpt-step", "--pretrained-checkpoint", "--finetune"})
"""Flags that choose the weights a run starts from."""


@dataclass(frozen=True)
class Candidate:
    """A pipeline to compare, described by the flags it adds to the recipe."""

    label: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """A training command line, minus the flags that choose a pipeline."""

    script: str
    flags: tuple[str, ...]
    """Flags shared by all runs: Megatron's, the script's, and a few of ours."""
    pipeline: tuple[str, ...]
    """The user's remaining flags from this package, which form the default candidate."""
    notes: tuple[str, ...] = ()
    """Notes about removed flags, one line per flag."""

    @classmethod
    def of(cls, command: Sequence[str]) -> Recipe:
        """Split a command's words into a script and its flags.

        Raises:
            ArgumentsError: There is no script.
        """
        words = [word for word in command if word != "--"]
        if not words or not words[0].endswith(".py"):
            raise ArgumentsError(
                "nothing to compare; name a script after --, as in "
                "`-- pretrain_gpt.py FLAGS --pipeline-schedule zb-h1`"
            )
        script = words[0]
        flags: list[str] = []
        pipeline: list[str] = []
        notes: list[str] = []
        # Our flags choose the pipeline, except for those that all runs share.
        our_flags = _our_flags()
        for group in _groups(words[1:]):
            flag = _flag_name(group[0])
            if flag in _LEFT_OUT:
                if _LEFT_OUT[flag]:
                    notes.append(f"left out: {flag}; {_LEFT_OUT[flag]}")
            elif flag in our_flags and flag not in _SHARED:
                pipeline += group
            else:
                flags += group
        return cls(script, tuple(flags), tuple(pipeline), tuple(notes))

    def value(self, flag: str) -> str | None:
        """Return a Megatron flag's last value in the recipe, or None."""
        value = None
        # As in argparse, the last value wins if a flag is repeated.
        for group in _groups(self.flags):
            name, equals, text = group[0].partition("=")
            if name == flag:
                value = text if equals else " ".join(group[1:])
        return value

    def has(self, flag: str) -> bool:
        """Return whether the recipe has a flag."""
        return self.value(flag) is not None

    def without(self, *names: str) -> Recipe:
        """Return the recipe without the given flags."""
        flags: list[str] = []
        for group in _groups(self.flags):
            if _flag_name(group[0]) not in names:
                flags += group
        return Recipe(self.script, tuple(flags), self.pipeline, self.notes)

    def command(self, candidate: Candidate, *extra_words: str) -> list[str]:
        """Return a candidate's command line, with the extra words appended."""
        return [self.script, *self.flags, *candidate.flags, *extra_words]

    @property
    def loads(self) -> bool:
        """Whether the recipe's `--load` gives all runs the same weights."""
        if self.has("--pretrained-checkpoint"):
            return True
        folder = self.value("--load")
        if folder is None:
            return False
        if self.has("--ckpt-step"):
            return True
        # A recipe that resumes from its `--save` folder may not
        # find a checkpoint there yet.
        tracker = Path(folder) / "latest_checkpointed_iteration.txt"
        return tracker.exists()


def refuse_shared(flags: Sequence[str], option: str) -> None:
    """Refuse a candidate's flags that must be the same in all runs.

    Args:
        flags: The words of the candidate.
        option: The `compare` option that they were given to, for the error message.

    Raises:
        ArgumentsError: A flag chooses the weights, the length of the run, or what the run writes.
    """
    for word in flags:
        name = _flag_name(word)
        if name in _WEIGHTS:
            raise ArgumentsError(
                f"{option} {name}: all runs start from the same weights; move {name} to the "
                "script's flags, or remove it"
            )
        if name in _LEFT_OUT:
            reason = _LEFT_OUT[name] or "compare sets it for all runs"
            raise ArgumentsError(f"{option} {name}: {reason}; remove it")


def candidates(
    recipe: Recipe,
    reference: Sequence[str],
    additions: Sequence[Sequence[str]],
) -> list[Candidate]:
    """Return the reference followed by the candidates, without duplicates.

    The recipe's own pipeline flags are the first candidate, followed by the additions.

    Args:
        recipe: The recipe that all contenders train.
        reference: Flags for the reference. If empty, the reference is Megatron's own schedule.
        additions: Flags for each extra candidate.

    Raises:
        ArgumentsError: There is nothing to compare with the reference.
    """
    reference_label = REFERENCE
    if reference:
        reference_label = label_of(reference)
    runs = [Candidate(reference_label, tuple(reference))]
    for flags in (recipe.pipeline, *additions):
        # A recipe without pipeline flags, or a repeated --with, adds no candidate.
        is_new = all(tuple(flags) != run.flags for run in runs)
        if flags and is_new:
            runs.append(Candidate(label_of(flags), tuple(flags)))
    if len(runs) == 1:
        raise ArgumentsError(
            "nothing to compare with Megatron's own schedule; add --pipeline-schedule NAME to the "
            "script's flags, or --with NAME or --best 3 before the --"
        )
    return runs


def label_of(flags: Sequence[str]) -> str:
    """Return a candidate's label: its flags, with the schedule flag shortened to its value."""
    words = [word for word in flags if word != _SCHEDULE]
    return shlex.join(word.removeprefix(f"{_SCHEDULE}=") for word in words)


def _our_flags() -> frozenset[str]:
    # argparse has no public API that lists a parser's flags.
    parser = add_arguments(WordParser("compare"))
    flags: set[str] = set()
    for action in parser._actions:
        flags.update(action.option_strings)
    return frozenset(flags)


def _flag_name(word: str) -> str:
    # A flag may be written as `--flag VALUE` or `--flag=VALUE`.
    return word.partition("=")[0]


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in words:
        # Values may start with a single dash, such as -1.
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group
