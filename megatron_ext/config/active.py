"""The configuration in force in this process, and what features keep for it.

One of the three things that a process has once (the others: the registry of patches, the device).
Whoever runs behind the configuration, patches and executor alike, asks here what was asked for;
what a feature has to keep from step to step is kept here too, so that it ends with the
configuration.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from megatron_ext.config.environment import Environment

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.disaggregation.job import Job

__all__ = [
    "Active",
    "activate_configuration",
    "active",
    "clear_configuration",
    "count_transport",
    "is_folded",
    "pipeline",
    "required",
    "transport_only",
]

_State = TypeVar("_State")


@dataclass(frozen=True, eq=False)
class Active:
    """A configuration, what it means in this process, and the state of features under it."""

    config: PipelineConfig
    pipeline: Pipeline | None = None
    """What our runtime executes; None: Megatron's own schedules run."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule, where it runs over our transport."""
    job: Job | None = None
    """The disaggregated job that this process is part of; None: forwards and backwards share their
    ranks."""
    seed: int | None = None
    """What random numbers follow from where they are drawn by micro-batch; None: as Megatron."""
    environment: Environment = field(default_factory=Environment.read)
    """Where this process is among those that were started together."""
    _states: dict[type, object] = field(default_factory=dict, init=False, repr=False)

    def state(self, kind: type[_State]) -> _State:
        """Return the one instance of a class that belongs to this configuration.

        Args:
            kind: Made without arguments at the first call. If it has a method `close`, that is
                called when the configuration is cleared.
        """
        if kind not in self._states:
            self._states[kind] = kind()
        return cast("_State", self._states[kind])

    def close(self) -> None:
        """Close what has a method `close`, the latest first, and forget all states."""
        for state in reversed(self._states.values()):
            close = getattr(state, "close", None)
            if close is not None:
                close()
        self._states.clear()


@dataclass
class _Process:
    """What this process holds."""

    configuration: Active | None = None
    num_transports: Counter[str] = field(default_factory=Counter)
    """Transports opened so far, by what they are for, under any configuration."""


_PROCESS = _Process()
"""The one active configuration."""


def activate_configuration(configuration: Active | None) -> None:
    """Put a configuration in force; None: nothing of ours takes part. States stay as they are."""
    _PROCESS.configuration = configuration


def active() -> Active | None:
    """Return the configuration in force, or None."""
    return _PROCESS.configuration


def required() -> Active:
    """Return the configuration in force, where there has to be one."""
    found = _PROCESS.configuration
    assert found is not None, "a configuration comes first: prepare, or megatron_ext.configure"
    return found


def count_transport(label: str) -> int:
    """Return a number for a transport that is opened: no other one with the label has it.

    It goes on from one configuration to the next, because peers meet under it in the job's store.
    """
    _PROCESS.num_transports[label] += 1
    return _PROCESS.num_transports[label]


def clear_configuration() -> None:
    """Take the configuration out of force, and close what features keep for it."""
    found, _PROCESS.configuration = _PROCESS.configuration, None
    if found is not None:
        found.close()


def pipeline() -> Pipeline | None:
    """Return the pipeline that our runtime executes; None: Megatron's own schedules run."""
    found = _PROCESS.configuration
    return None if found is None else found.pipeline


def transport_only() -> Pipeline | None:
    """Return Megatron's own schedule where it runs over our transport, or None."""
    found = _PROCESS.configuration
    return None if found is None else found.transport_only


def is_folded() -> bool:
    """Tell whether the pipeline in force ends on the rank where it began (V and W)."""
    found = pipeline()
    return found is not None and found.is_folded
