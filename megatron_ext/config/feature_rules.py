"""The interface through which `features/` extends the checks of a configuration.

The base class checks nothing. A feature overrides the methods that it needs; `feature_list.RULES`
lists the subclasses.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.feature_list import RULES

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.layout_forecast import Layout
    from megatron_ext.schedules.table.actions import Schedule


@dataclass(frozen=True)
class MemoryNeeded:
    """A feature's forecast for the rank that needs the most memory."""

    rank: int
    gib: float
    assumption: str
    """What the forecast assumes, such as `if all micro-batches have 4096 tokens`."""
    remedy: str
    """How the job could need less."""


class FeatureRules:
    """What a feature checks, completes and sets in a job's configuration."""

    texts: ClassVar[Mapping[str, str]] = {}
    """Rules about Megatron's settings by group, in the notation of `megatron_ext/rules.py`."""
    summation_reason: ClassVar[str] = ""
    """Why two runs with different `summation` may compute different numbers."""

    def completed(
        self,
        config: PipelineConfig,
        settings: Mapping[str, Any],
    ) -> PipelineConfig:
        """Return the configuration of a job with these settings, by Megatron's argument names."""
        return config

    def decided(
        self,
        answer: Preflight,
        config: PipelineConfig,
        args: Namespace,
        device: DeviceKind | None,
        *,
        in_job: bool,
    ) -> PipelineConfig:
        """Return the configuration with the feature's `auto` settings replaced by choices.

        Adds a line per choice to `answer.changes`.

        Args:
            answer: The preflight's answer so far.
            config: The completed configuration.
            args: Megatron's arguments before its validation, or equivalent sizes.
            device: Description of the devices, or None if unknown.
            in_job: Whether this process is a rank of the job, so that its device can be asked.
        """
        return config

    def why_no_forecast(self, config: PipelineConfig) -> str | None:
        """Return why the planner cannot forecast a job with this feature, or None."""
        return None

    def memory_needed(self, pipeline: Pipeline, plan: Layout) -> MemoryNeeded | None:
        """Return the memory that a job needs with this feature; None if it does not change it.

        `plan` is the planner's forecast for whole micro-batches of the maximum sequence length.

        Raises:
            ScheduleError: The feature cannot run with these sizes.
        """
        return None

    def groups(self, config: PipelineConfig) -> list[tuple[str, str]]:
        """Return (field of the configuration, group of rules) for each group that applies."""
        return []

    def dropped(self, config: PipelineConfig) -> tuple[str, ...]:
        """Return the groups of rules whose settings are dropped when flags are read."""
        return ()

    def imply(self, answer: Preflight, config: PipelineConfig, args: Namespace) -> None:
        """Add the arguments that the feature sets for Megatron, with changes and notices."""

    def refuse(
        self,
        answer: Preflight,
        config: PipelineConfig,
        table: Schedule | None,
        args: Namespace,
    ) -> None:
        """Add refusals that depend on numbers, which rules cannot express."""

    def refuse_device(self, config: PipelineConfig) -> None:
        """Check this process's device and release of Megatron.

        Raises:
            ScheduleError: They cannot run the feature.
        """

    def refuse_built(self, pipeline: Pipeline, fields: Mapping[str, Any]) -> None:
        """Check the fields of a `TransformerConfig` against the active pipeline.

        Raises:
            ArgumentsError: A program built the object with other settings than the table needs.
        """

    def summation(
        self,
        config: PipelineConfig,
        pp: int,
    ) -> dict[str, int | str]:
        """Return the settings that determine the order in which a run sums over tokens.

        Runs on `pp` pipeline ranks with equal settings sum in the same order. The keys are
        descriptions for the user. Settings with their defaults may be left out.
        """
        return {}

    def recorded(self, config: PipelineConfig) -> dict[str, Any]:
        """Return the settings that a trace records."""
        return {}

    def remarks(self, pipeline: Pipeline, table: Schedule) -> Iterator[str]:
        """Yield clauses for the log line about the pipeline that runs."""
        return iter(())


@cache
def feature_rules() -> tuple[FeatureRules, ...]:
    """Return the features' rules, in the order in which they are applied."""
    checks: list[FeatureRules] = []
    # Import on first use, because features import this module.
    for entry in RULES:
        module, _, name = entry.partition(":")
        rules_class = getattr(import_module(module), name)
        checks.append(rules_class())
    return tuple(checks)
