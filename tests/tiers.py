"""The short tier: as many cases of each test as fit into the seconds that a test may take.

`durations.json` holds the seconds of each case that takes half a second or more on two idle
cores; `bash tests/run.sh --all --measure` writes it. A case that is not in it is quick, or new.
Tests named by a mutant (`tests.mutations`) always stay, as a guard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DURATIONS = Path(__file__).with_name("durations.json")
KNOWN_FROM_S = 0.5
SHORT_S = 2.0
"""Seconds for all cases of one test together, unless it is marked with `short_s`."""


def durations() -> dict[str, float]:
    """Return the measured seconds by node id."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def write(measured: Mapping[str, float], *, short: bool) -> None:
    """Update the measured seconds of the tests that ran; keep those of other tests.

    Args:
        measured: Seconds by node id.
        short: Whether only the short tier ran. The cases that it left out then keep their seconds:
            without them they would count as quick, and would run from then on.
    """
    tests = {_test(case) for case in measured}
    known_times_s = {}
    for case, time_s in durations().items():
        is_renewed = case in measured if short else _test(case) in tests
        if not is_renewed:
            known_times_s[case] = time_s
    known_times_s |= {
        case: round(s, 1) for case, s in measured.items() if s >= KNOWN_FROM_S
    }
    DURATIONS.write_text(
        json.dumps(dict(sorted(known_times_s.items())), indent=0) + "\n"
    )


def left_out(
    items: Iterable[pytest.Item], short_s: float = SHORT_S
) -> list[pytest.Item]:
    """Return the tests that the short tier leaves out, in order; `short_s` is the default limit."""
    from tests.mutations.run_mutant import ALL_MUTANTS

    guards = {test for mutant in ALL_MUTANTS for test in mutant.tests}
    known_times_s = durations()
    spent_s = Counter[str]()
    deselected = []
    for item in items:
        case, test = item.nodeid, _test(item.nodeid)
        mark = item.get_closest_marker("short_s")
        time_s = known_times_s.get(case, 0.0)
        stays = spent_s[test] + time_s <= (mark.args[0] if mark else short_s)
        if case not in guards and (item.get_closest_marker("slow") or not stays):
            deselected.append(item)
        else:
            spent_s[test] += time_s
    return deselected


def summary(left_out_by_room: Mapping[str, int], all_cases: int) -> str:
    """Return a line about the tests that were left out, by folder."""
    places = ", ".join(
        f"{place} {count}" for place, count in Counter(left_out_by_room).most_common(6)
    )
    num_left_out = sum(left_out_by_room.values())
    return (
        f"the short tier left out {num_left_out:,} of {all_cases:,} cases ({places}); "
        "all run with: bash tests/run.sh --all"
    )


def _test(case: str) -> str:
    return case.partition("[")[0]
