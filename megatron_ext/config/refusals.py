"""The answer of `preflight`: what a configuration takes, changes and refuses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.config.flags import in_flags
from megatron_ext.errors import ArgumentsError, ConfigurationError, ScheduleError, UserError

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.roles import Job


class Refusal(NamedTuple):
    """A reason why a configuration cannot run, and the nearest thing that works."""

    rule: str
    """The setting or the check that refuses."""
    reason: str
    remedy: str
    error: type[ArgumentsError | ScheduleError] = ArgumentsError
    """The error that it is where training starts."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


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
    alike: dict[str, str | None] = field(default_factory=dict)
    """Flags that nobody here knows, each with a known one that is close, or None."""
    config: PipelineConfig | None = None
    """The pipeline as the flags describe it; None: they contradict each other."""
    pipeline: Pipeline | None = None
    """The pipeline that runs; None: Megatron's own schedules run, or it is refused."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if its messages travel over our transport."""
    job: Job | None = None
    """The disaggregated job, in a process of it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments by Megatron's names that let it host the pipeline."""
    given: Namespace = field(default_factory=Namespace)
    """The arguments that were checked, with Megatron's defaults for missing ones."""

    @property
    def accepted(self) -> bool:
        """Whether the configuration can run."""
        return not self.refusals

    def unknown_flags(self) -> Iterator[str]:
        """Yield a line for each flag that only a script of the user's may have."""
        for flag, alike in self.alike.items():
            hint = f"did you mean {alike}?" if alike else "is it of your script?"
            yield f"{flag} is unknown to the Megatron that is installed here; {hint}"

    def raise_refusals(self) -> None:
        """Raise all refusals as one `ArgumentsError` or `ScheduleError`, a line for each."""
        if self.refusals:
            of_schedule = all(refusal.error is ScheduleError for refusal in self.refusals)
            kind = ScheduleError if of_schedule else ArgumentsError
            raise kind("\n".join(map(str, self.refusals)))

    @contextmanager
    def collecting(self, rule: str) -> Iterator[None]:
        """Make errors inside this context refusals by a rule; the check goes on after it."""
        try:
            yield
        except UserError as error:
            text = str(error)
            if isinstance(error, ConfigurationError):
                text = error.worded(in_flags)
            kind = ScheduleError if isinstance(error, ScheduleError) else ArgumentsError
            for line in text.splitlines():
                reason, _, remedy = line.rpartition("; ")
                refusal = Refusal(rule, reason or remedy, remedy if reason else "", kind)
                # Both the number of stages and the cut into them read the flags of a cut.
                if refusal not in self.refusals:
                    self.refusals.append(refusal)
