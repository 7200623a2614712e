"""What a feature changes in tables: the seam between `generate` and `features/`.

`generate` makes one `TableChange` of each kind and calls the methods below, in this order. Those of
this class change nothing, and neither do those of a feature whose option is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.feature_list import TABLES

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Option, Schedule
    from megatron_ext.schedules.table.costs import Costs


class TableChange:
    """A feature in the making of one table."""

    passes_per_microbatch: int = 1
    """Times that each stage runs F for a micro-batch; a generator takes each for a micro-batch."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        """Read the feature's option among all that `generate` was given."""

    def of_file(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return the table of a file with this feature.

        Raises:
            ScheduleError: The file's table cannot have it.
        """
        return schedule

    def check(self, name: str) -> None:
        """Check the options before a schedule's table is generated.

        Raises:
            ScheduleError: They do not fit.
        """

    def costs(self, costs: Costs) -> Costs:
        """Return the costs that the table is made for."""
        return costs

    def change(self, schedule: Schedule, costs: Costs, *, is_made_for_pairs: bool) -> Schedule:
        """Return a generated table with this feature.

        Raises:
            ScheduleError: The table cannot have it.
        """
        return schedule


@cache
def _classes() -> Mapping[str, type[TableChange]]:
    """Return what features change in tables, by option."""
    classes: dict[str, type[TableChange]] = {}
    for option, entry in TABLES.items():
        module, _, name = entry.partition(":")
        classes[option] = getattr(import_module(module), name)
    return classes


def in_use(**options: Option) -> dict[str, Any]:
    """Return options of features without those that are off, `pairs=False` and `slices=1`.

    So a table without a feature needs none of its files.
    """
    return {
        option: value
        for option, value in options.items()
        if value is True or (not isinstance(value, bool) and value != 1)
    }


def table_changes(options: dict[str, Option]) -> list[TableChange]:
    """Return what features change in a table, and take their options out of `options`."""
    all_options = dict(options)
    changes: list[TableChange] = []
    for option, change_class in _classes().items():
        options.pop(option, None)
        changes.append(change_class(all_options))
    return changes
