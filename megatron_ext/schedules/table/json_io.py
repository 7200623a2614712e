"""Tables as JSON. Unlike CSV it holds name, options, placement, twins and times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Action, Schedule
from megatron_ext.schedules.table.placement import Placement

__all__ = ["dumps", "loads"]


def dumps(schedule: Schedule, **times: Sequence[Sequence[float]]) -> str:
    """Return a table as JSON.

    Args:
        schedule: The table.
        times: Additional rows, such as the `starts` and `ends` of a simulation.
    """
    placement = schedule.placement
    content: dict[str, Any] = {
        "schedule": schedule.name,
        "options": dict(schedule.options),
        "num_microbatches": schedule.num_microbatches,
        "placement": {
            "name": placement.name,
            "num_ranks": placement.num_ranks,
            "rank_of": placement.rank_of,
            "twins": placement.twins,
            "twin_hops": sorted(placement.twin_hops),
            **({"backward_rank_of": placement.backward_rank_of} if schedule.disaggregated else {}),
        },
        "rows": [[str(action) for action in row] for row in schedule.rows],
    }
    content.update(times)
    lines = (f"  {json.dumps(key)}: {_value(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: Any) -> str:
    """JSON with one line for each row of a table."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], list):
        return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
    return json.dumps(value)


def loads(text: str) -> Schedule:
    """Return the schedule of a JSON text, not validated; times are ignored.

    Raises:
        ScheduleError: The text does not have the format of `dumps`.
    """
    try:
        content = json.loads(text)
        where = content["placement"]
        placement = Placement(
            where["name"],
            where["num_ranks"],
            tuple(where["rank_of"]),
            where["twins"],
            frozenset(where["twin_hops"]),
            tuple(where["backward_rank_of"]) if "backward_rank_of" in where else None,
        )
        rows = tuple(tuple(map(Action.parse, row)) for row in content["rows"])
        return Schedule(
            content["schedule"], placement, content["num_microbatches"], rows, content["options"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ScheduleError(
            f"this JSON is not a schedule ({error!r}); write one with `megatron-ext plot NAME "
            f"--pp P --microbatches M -o FILE.json`"
        ) from error
