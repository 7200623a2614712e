"""How features change tables: the interface between `generate` and `features/`.

`generate` creates one `TableChange` per feature and calls its methods in the order below. The base
class changes nothing, and neither does a feature whose option is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.feature_list import TABLES

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.costs import Costs


class TableChange:
    """The changes that a feature makes while a table is being built."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Read this feature's option from the options passed to `generate`."""

    def of_file(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return a table loaded from a file, with this feature applied.

        Raises:
            ScheduleError: The table in the file does not support this feature.
        """
        return schedule

    def check(self, name: str) -> None:
        """Check the options before a schedule's table is generated.

        Raises:
            ScheduleError: The schedule does not support these options.
        """

    def num_passes(self, num_microbatches: int) -> int:
        """Return how many times a stage runs F in a step with this many micro-batches.

        The generator treats each of these passes as a micro-batch.
        """
        return num_microbatches

    def costs(self, costs: Costs) -> Costs:
        """Return the costs that the table is generated for."""
        return costs

    def change(
        self,
        schedule: Schedule,
        costs: Costs,
        *,
        alternates: bool,
    ) -> Schedule:
        """Return a generated table with this feature applied.

        `alternates` says whether forward and backward passes are already next to each other.

        Raises:
            ScheduleError: The table does not support this feature.
        """
        return schedule

    def flags(self, schedule: Schedule) -> list[str]:
        """Return the flags with which a job trains with this feature of a table."""
        return []


@cache
def _classes() -> Mapping[str, type[TableChange]]:
    """Return all features' `TableChange` classes by option name."""
    classes: dict[str, type[TableChange]] = {}
    # Import on first use, because features import this module.
    for option, entry in TABLES.items():
        module, _, name = entry.partition(":")
        classes[option] = getattr(import_module(module), name)
    return classes


def in_use(**options: Any) -> dict[str, Any]:
    """Return the features' options without those that are off.

    `generate` rejects options that it does not know, so an option that is off must not reach it if
    the feature has been removed.
    """
    changing = {}
    for option, value in options.items():
        # A switch changes tables if it is on, a number if it is not 1, and a list of
        # sizes if it is not empty. Check for switches first, because in Python, True
        # equals 1.
        if isinstance(value, bool):
            is_on = value
        else:
            is_on = value not in (1, ())
        if is_on:
            changing[option] = value
    return changing


def take_table_changes(options: dict[str, Any]) -> list[TableChange]:
    """Return the changes that features make and remove their options from `options`."""
    # A change may depend on other features' options, so each one gets all of them.
    all_options = dict(options)
    changes: list[TableChange] = []
    for option, change_class in _classes().items():
        # The remaining options go to the generator, which rejects unknown ones.
        options.pop(option, None)
        changes.append(change_class(all_options))
    return changes
