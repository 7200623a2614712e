"""The active configuration of this process, and the state that features keep under it.

One of three process-wide objects; the others are the registry of patches and the device. Patches
and the executor read the user's settings here. State that a feature keeps from step to step lives
here too, so it ends with the configuration.
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
    from megatron_ext.runtime.executor import Observer

__all__ = [
    "Active",
    "activate_configuration",
    "active",
    "clear_configuration",
    "count_transport",
    "is_folded",
    "pipeline",
    "process_state",
    "required",
    "transport_only",
]

_State = TypeVar("_State")


@dataclass(frozen=True, eq=False)
class Active:
    """A configuration, its meaning in this process, and the state of features under it."""

    config: PipelineConfig
    pipeline: Pipeline | None = None
    """The pipeline that our runtime executes; None: Megatron's own schedules run."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if it runs over our transport, else None."""
    job: Job | None = None
    """The disaggregated job that this process is part of; None: forwards and backwards share their
    ranks."""
    world_size: int = 1
    """Ranks of the job, as far as the configuration knows."""
    seed: int | None = None
    """Base seed of random numbers drawn by micro-batch; None: Megatron's generators run on."""
    asked: PipelineConfig | None = None
    """The argument of `configure`, for hosts that know the sizes of a job; None: flags."""
    is_sized: bool = True
    """Whether the sizes of the job are known; False: a host has yet to give them."""
    observers: list[Observer] = field(default_factory=list)
    """Handed to the runtime when it is made; append before the first step."""
    environment: Environment = field(default_factory=Environment.read)
    """Place of this process among those that the launcher started together."""
    _states: dict[type, object] = field(default_factory=dict, init=False, repr=False)

    def state(self, kind: type[_State]) -> _State:
        """Return this configuration's only instance of a class.

        Args:
            kind: The first call constructs it without arguments. Clearing the configuration calls
                its `close` method, if it has one.
        """
        found = self._states.get(kind)
        if found is None:
            found = self._states[kind] = kind()
        return cast("_State", found)

    def end_observation(self) -> None:
        """Close the observers and drop them."""
        for observer in self.observers:
            observer.close()
        self.observers.clear()

    def close(self) -> None:
        """Close the observers and all states that have a `close` method, latest first."""
        self.end_observation()
        for state in reversed(self._states.values()):
            close = getattr(state, "close", None)
            if close is not None:
                close()
        self._states.clear()


@dataclass
class _Process:
    """The state of this process."""

    configuration: Active | None = None
    num_transports: Counter[str] = field(default_factory=Counter)
    """Transports opened so far, by label, under any configuration."""
    states: dict[type, object] = field(default_factory=dict)
    """State of features that models use with and without a configuration."""


_PROCESS = _Process()
"""The one active configuration."""


def activate_configuration(configuration: Active | None) -> None:
    """Activate a configuration; None: training runs as without this package. States are kept."""
    _PROCESS.configuration = configuration


def active() -> Active | None:
    """Return the active configuration, or None."""
    return _PROCESS.configuration


def required() -> Active:
    """Return the active configuration; there must be one."""
    found = _PROCESS.configuration
    assert found is not None, "no active configuration; call prepare or megatron_ext.configure"
    return found


def process_state(kind: type[_State]) -> _State:
    """Return this process's only instance of a class, independent of the configuration.

    Args:
        kind: Made without arguments at the first call.
    """
    if kind not in _PROCESS.states:
        _PROCESS.states[kind] = kind()
    return cast("_State", _PROCESS.states[kind])


def count_transport(label: str) -> int:
    """Return the number of a new transport, unique among those with the same label.

    Counting continues from one configuration to the next, because peers find each other in the
    job's store by this number.
    """
    _PROCESS.num_transports[label] += 1
    return _PROCESS.num_transports[label]


def clear_configuration() -> None:
    """Deactivate the configuration and close the state that features keep under it."""
    found, _PROCESS.configuration = _PROCESS.configuration, None
    if found is not None:
        found.close()


def pipeline() -> Pipeline | None:
    """Return the pipeline that our runtime executes; None: Megatron's own schedules run."""
    found = _PROCESS.configuration
    return None if found is None else found.pipeline


def transport_only() -> Pipeline | None:
    """Return Megatron's own schedule if it runs over our transport, else None."""
    found = _PROCESS.configuration
    return None if found is None else found.transport_only


def is_folded() -> bool:
    """Return whether the active pipeline ends on the rank where it begins (V and W)."""
    found = pipeline()
    return found is not None and found.is_folded
