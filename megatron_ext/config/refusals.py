"""The result of `preflight`: which settings a configuration accepts, changes and rejects."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import in_flags, with_flags
from megatron_ext.errors import (
    ArgumentsError,
    ConfigurationError,
    ScheduleError,
    UserError,
    Wording,
    reworded,
)

if TYPE_CHECKING:
    from megatron_ext.config.active import Choice, Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.roles import Job
    from megatron_ext.planning.choice import Candidate


@dataclass(frozen=True)
class Refusal:
    """A reason why a configuration cannot run, and the closest alternative that works."""

    rule: str
    """The setting or check that rejects the configuration."""
    cause: str
    """The reason, with settings as `--flag` or `--flag=value`, as `errors.reworded` expects."""
    way_out: str
    """The remedy, in the same form; may be empty."""
    error: type[ArgumentsError | ScheduleError] = ArgumentsError
    """The type of error to raise when training starts."""

    @property
    def reason(self) -> str:
        """The reason why the configuration cannot run, with settings as flags."""
        return reworded(self.cause, in_flags)

    @property
    def remedy(self) -> str:
        """The closest alternative that works, with settings as flags; may be empty."""
        return reworded(self.way_out, in_flags)

    def worded(self, wording: Wording) -> str:
        """Return reason and remedy on one line, with settings in the given wording."""
        message = f"{self.cause}; {self.way_out}" if self.way_out else self.cause
        return reworded(message, wording)

    def __str__(self) -> str:
        return self.worded(in_flags)


@dataclass
class Preflight:
    """The result of `preflight`: whether training can start, and how it differs from its flags."""

    refusals: list[Refusal] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """Sentences about changes to the user's settings: the cut of the model, and settings that are
    dropped or replaced."""
    notices: list[str] = field(default_factory=list)
    """Sentences about settings that have less effect than one would expect."""
    ignored: list[str] = field(default_factory=list)
    """Names of settings that neither this package nor the installed Megatron defines. For a command
    line, these are flags that only a user's script may define."""
    suggestions: dict[str, str | None] = field(default_factory=dict)
    """Unknown flag -> a similar flag that exists, or None."""
    config: PipelineConfig | None = None
    """The pipeline that the flags describe, or None if the flags contradict each other."""
    pipeline: Pipeline | None = None
    """The pipeline that runs, or None if Megatron's own schedules run or the configuration is
    rejected."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if our transport carries its messages, else None."""
    candidates: Sequence[Candidate] = ()
    """The best accepted schedules under `auto`, as many as requested."""
    choice: Choice | None = None
    """The schedule that `auto` has chosen, if any."""
    job: Job | None = None
    """The disaggregated job, if this process belongs to one."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments that Megatron needs to host the pipeline, by Megatron's names."""
    checked_args: Namespace = field(default_factory=Namespace)
    """The arguments that were checked, with Megatron's defaults for missing ones."""

    @property
    def accepted(self) -> bool:
        """Whether the configuration can run."""
        return not self.refusals

    def unknown_flags(self) -> Iterator[str]:
        """Yield a line for each flag that only a user's script may define."""
        for flag, suggestion in self.suggestions.items():
            hint = "does your script define it?"
            if suggestion:
                hint = f"did you mean {suggestion}?"
            yield f"{flag} is unknown to the installed Megatron; {hint}"

    def raise_refusals(self, wording: Wording = in_flags) -> None:
        """Raise all refusals as one `ArgumentsError` or `ScheduleError`, one line per refusal.

        Args:
            wording: Renders settings for the reader of the error.
        """
        if self.refusals:
            lines = [refusal.worded(wording) for refusal in self.refusals]
            message = "\n".join(lines)
            errors = {refusal.error for refusal in self.refusals}
            if errors == {ScheduleError}:
                raise ScheduleError(message)
            raise ArgumentsError(message)

    @contextmanager
    def collecting(self, rule: str) -> Iterator[None]:
        """Convert errors raised in this context into refusals by `rule`. Checks then continue."""
        try:
            yield
        except UserError as error:
            text = str(error)
            if isinstance(error, ConfigurationError):
                text = error.worded(with_flags)
            kind: type[ArgumentsError | ScheduleError] = ArgumentsError
            if isinstance(error, ScheduleError):
                kind = ScheduleError
            for line in text.splitlines():
                # Messages end with "; REMEDY".
                reason, separator, remedy = line.rpartition("; ")
                refusal = Refusal(rule, reason, remedy, kind)
                if not separator:
                    refusal = Refusal(rule, line, "", kind)
                # Two checks read the flags that cut the model (for the number of stages, and for
                # their layers), so the same error may occur twice.
                if refusal not in self.refusals:
                    self.refusals.append(refusal)
