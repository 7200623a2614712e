"""The answer of `preflight`: what a configuration takes, changes and refuses."""

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
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.roles import Job
    from megatron_ext.planning.choice import Candidate


@dataclass(frozen=True)
class Refusal:
    """A reason why a configuration cannot run, and the nearest thing that works."""

    rule: str
    """The setting or the check that refuses."""
    cause: str
    """The reason, for `errors.reworded`: with settings as `--flag` or `--flag=value`."""
    way_out: str
    """The remedy, in the same form; may be empty."""
    error: type[ArgumentsError | ScheduleError] = ArgumentsError
    """The error that it is where training starts."""

    @property
    def reason(self) -> str:
        """Why it cannot run, in flags."""
        return reworded(self.cause, in_flags)

    @property
    def remedy(self) -> str:
        """The nearest thing that works, in flags; may be empty."""
        return reworded(self.way_out, in_flags)

    def worded(self, wording: Wording) -> str:
        """Return reason and remedy in a reader's words, in one line."""
        message = f"{self.cause}; {self.way_out}" if self.way_out else self.cause
        return reworded(message, wording)

    def __str__(self) -> str:
        return self.worded(in_flags)


@dataclass
class Preflight:
    """Answer of `preflight`: whether a training can run, and how it differs from its flags."""

    refusals: list[Refusal] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """Settings that the schedule replaces: the cut of the model, what is dropped or taken over."""
    notices: list[str] = field(default_factory=list)
    """Notices of settings with less effect than they seem to have."""
    ignored: list[str] = field(default_factory=list)
    """Settings that neither Megatron, where one is installed, nor this package knows. Of a command
    line those that only a script of the user's may have."""
    suggestions: dict[str, str | None] = field(default_factory=dict)
    """Flags that nobody here knows, each with a known one that is close, or None."""
    config: PipelineConfig | None = None
    """The pipeline as the flags describe it; None: they contradict each other."""
    pipeline: Pipeline | None = None
    """The pipeline that runs; None: Megatron's own schedules run, or it is refused."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if its messages travel over our transport."""
    candidates: Sequence[Candidate] = ()
    """The best schedules that `auto` may take here, as many as were asked for."""
    job: Job | None = None
    """The disaggregated job, in a process of it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments by Megatron's names that let it host the pipeline."""
    checked_args: Namespace = field(default_factory=Namespace)
    """The arguments that were checked, with Megatron's defaults for missing ones."""

    @property
    def accepted(self) -> bool:
        """Whether the configuration can run."""
        return not self.refusals

    def unknown_flags(self) -> Iterator[str]:
        """Yield a line for each flag that only a script of the user's may have."""
        for flag, suggestion in self.suggestions.items():
            hint = "is it of your script?"
            if suggestion:
                hint = f"did you mean {suggestion}?"
            yield f"{flag} is unknown to the Megatron that is installed here; {hint}"

    def raise_refusals(self, wording: Wording = in_flags) -> None:
        """Raise all refusals as one `ArgumentsError` or `ScheduleError`, a line for each.

        Args:
            wording: Says settings for the reader of the error.
        """
        if self.refusals:
            message = "\n".join(refusal.worded(wording) for refusal in self.refusals)
            if all(refusal.error is ScheduleError for refusal in self.refusals):
                raise ScheduleError(message)
            raise ArgumentsError(message)

    @contextmanager
    def collecting(self, rule: str) -> Iterator[None]:
        """Make errors inside this context refusals by a rule; the check goes on after it."""
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
                reason, separator, remedy = line.rpartition("; ")
                refusal = Refusal(rule, reason, remedy, kind)
                if not separator:
                    refusal = Refusal(rule, line, "", kind)
                # Both the number of stages and the cut into them read the flags of a cut.
                if refusal not in self.refusals:
                    self.refusals.append(refusal)
