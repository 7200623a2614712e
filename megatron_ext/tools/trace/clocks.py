"""Puts all ranks' traces on one clock, using the messages that the ranks exchanged.

The ranks on a host share a clock until the host reboots. Messages in both directions relate two
hosts' clocks, as in NTP.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_ext.tools.trace.survey import RankSurvey
    from megatron_ext.tracing.records import Header

_TwoRanks = tuple[int, int]
"""Global ranks of the sender and the receiver."""
_TwoClocks = tuple[str, str]
"""Clocks of the sender and the receiver."""
_SentMessage = tuple[int, int]
"""Global rank of the sender, and the message's number."""
_Pipeline = tuple[int, int]
"""Replica, and the step's number."""


class Transit(NamedTuple):
    """A message with both its send and its receive recorded."""

    took_ns: int
    """Time from the start of the send on the sender's clock to the end of the receive on the
    receiver's clock."""
    was_late: bool
    """Whether the receiver waited for the message."""


class ClockShift(NamedTuple):
    """The amount to add to times on one clock to make them agree with the first rank's clock."""

    shift_ns: int
    error_ns: int | None
    """Half the distance between the two bounds, or None if the shift is based on the time of day,
    which may be wrong."""


def use_one_clock(surveys: Sequence[RankSurvey]) -> list[str]:
    """Shift all ranks' times to one clock and return notes about the shifts.

    Also set the values that depend on several ranks' times: message delays, and when the pipeline
    started and ended in each step.
    """
    transits = _transits(surveys)
    fastest_ns: dict[_TwoRanks, int] = {}
    for ranks, messages in transits.items():
        # The fastest message gives the tightest bound on the clocks.
        fastest_ns[ranks] = min(message.took_ns for message in messages)
    headers = {survey.header.rank: survey.header for survey in surveys}
    shifts = align(headers, fastest_ns)

    for survey in surveys:
        shift_ns = shifts[survey.header.clock].shift_ns
        survey.file.shift_ns = shift_ns
        survey.steps = [
            step._replace(begin_ns=step.begin_ns + shift_ns) for step in survey.steps
        ]
    _extend_steps_to_pipelines(surveys)
    _measure_delays(surveys, transits)
    return _notes(shifts)


def _transits(surveys: Sequence[RankSurvey]) -> dict[_TwoRanks, list[Transit]]:
    """Return (sender, receiver) -> their messages, with durations measured across both clocks."""
    send_begins_ns: dict[_SentMessage, int] = {}
    for survey in surveys:
        for number, begin_ns in survey.sends.items():
            # The key includes the sending rank, so a message counts only if both
            # files agree on the sender.
            send_begins_ns[survey.header.rank, number] = begin_ns
    transits: dict[_TwoRanks, list[Transit]] = defaultdict(list)
    for survey in surveys:
        for number, receive in survey.receives.items():
            send_ns = send_begins_ns.get((receive.source, number))
            if send_ns is not None:
                took_ns = receive.end_ns - send_ns
                ranks = receive.source, survey.header.rank
                transits[ranks].append(Transit(took_ns, receive.was_late))
    return transits


def _extend_steps_to_pipelines(surveys: Sequence[RankSurvey]) -> None:
    """Make each step's pipeline last from the first to the last action on any rank.

    Combine only ranks of the same replica, because replicas do not wait for each other within their
    pipelines.
    """
    begins_ns: dict[_Pipeline, list[float]] = defaultdict(list)
    ends_ns: dict[_Pipeline, list[float]] = defaultdict(list)
    for survey in surveys:
        for step in survey.steps:
            if step.actions and not step.failed:
                # If replicas do not exchange messages, only the time of day relates
                # their clocks, and its error would count as idle time.
                pipeline = survey.header.data, step.number
                begins_ns[pipeline].append(step.begin_ns + step.first_ns)
                ends_ns[pipeline].append(step.begin_ns + step.pipeline_ns)
    for survey in surveys:
        for index, step in enumerate(survey.steps):
            pipeline = survey.header.data, step.number
            if pipeline in ends_ns and not step.failed:
                # The bubble includes the idle time before a rank's first action and after its last
                # one. Without it, a simulated 1F1B step had a bubble of
                # 19.5 % instead of 30.6 %.
                begin_ns = min(begins_ns[pipeline])
                end_ns = max(ends_ns[pipeline])
                survey.steps[index] = step.within(begin_ns, end_ns)


def _measure_delays(
    surveys: Sequence[RankSurvey], transits: Mapping[_TwoRanks, Sequence[Transit]]
) -> None:
    """Set each link's delay to the median over the messages that the receiver waited for."""
    shifts_ns = {survey.header.rank: survey.file.shift_ns for survey in surveys}
    for survey in surveys:
        target = survey.header.rank
        for source, link in survey.links.items():
            messages = transits.get((source, target), ())
            late_ns = [message.took_ns for message in messages if message.was_late]
            if late_ns:
                median_ns = statistics.median_low(late_ns)
                delay_ns = median_ns + shifts_ns[target] - shifts_ns[source]
                # Due to clock errors, a fast message may appear to
                # arrive before it was sent.
                link.delay_ns = max(0, delay_ns)


def _notes(shifts: Mapping[str, ClockShift]) -> list[str]:
    """Return notes about how the clocks were aligned if there is more than one clock."""
    if len(shifts) < 2:
        return []
    notes = []
    for clock, shift in shifts.items():
        means = "by the time of day"
        if shift.error_ns is not None:
            means = f"+- {shift.error_ns / 1e3:.0f} us by messages"
        notes.append(f"clock {clock}: {shift.shift_ns / 1e6:+.3f} ms, {means}")
    return notes


def align(
    headers: Mapping[int, Header], fastest_ns: Mapping[_TwoRanks, int]
) -> dict[str, ClockShift]:
    """Find the shift for each clock that makes all clocks agree with the lowest rank's clock.

    Messages relate two clocks directly. Hosts that do not exchange messages are related through
    other hosts. If no chain of messages connects a clock to the first one, its shift is based on
    the time of day that the lowest rank on that clock recorded at the start. Messages then relate
    more clocks to that one.

    Args:
        headers: Rank -> header.
        fastest_ns: (sending rank, receiving rank) -> time taken by their fastest message, from its
            start on the sender's clock to its end on the receiver's clock.

    Returns:
        The shift of each clock.
    """
    bounds_ns = _bounds_between_clocks(headers, fastest_ns)
    first = headers[min(headers)]
    first_clock_zero_ns = first.wall_ns - first.clock_ns
    shifts: dict[str, ClockShift] = {}
    for rank in sorted(headers):
        header = headers[rank]
        if header.clock in shifts:
            continue
        # Compare every clock with its host's time of day.
        clock_zero_ns = header.wall_ns - header.clock_ns
        error_ns = 0 if header is first else None
        shifts[header.clock] = ClockShift(clock_zero_ns - first_clock_zero_ns, error_ns)
        _relate(header.clock, bounds_ns, shifts)
    return shifts


def _bounds_between_clocks(
    headers: Mapping[int, Header], fastest_ns: Mapping[_TwoRanks, int]
) -> dict[_TwoClocks, int]:
    """Return upper bounds on how far the second of two clocks is ahead of the first.

    If a message was sent at time s on the first clock and arrived at time r on the second, the
    second clock is ahead by at most r - s.
    """
    bounds_ns: dict[_TwoClocks, int] = {}
    for (source, target), took_ns in fastest_ns.items():
        clocks = headers[source].clock, headers[target].clock
        tightest_ns = bounds_ns.get(clocks, took_ns)
        bounds_ns[clocks] = min(tightest_ns, took_ns)
    return bounds_ns


def _relate(
    root: str,
    bounds_ns: Mapping[_TwoClocks, int],
    shifts: dict[str, ClockShift],
) -> None:
    """Add the shifts of all clocks that messages connect to a clock with a known shift."""
    # Errors add up along a chain of clocks, and a breadth-first search
    # finds the shortest chains.
    queue = [root]
    # The loop also visits the clocks that it appends.
    for reference in queue:
        for (ahead, clock), upper_ns in sorted(bounds_ns.items()):
            if ahead != reference or clock in shifts:
                continue
            backward_ns = bounds_ns.get((clock, ahead))
            if backward_ns is None:
                continue
            # The clock is ahead of the reference by at most `upper_ns` and at least `-backward_ns`.
            # If the maximum is below the minimum, one of the clocks has drifted.
            error_ns = shifts[reference].error_ns
            if error_ns is not None:
                error_ns += abs(upper_ns + backward_ns) // 2
            midpoint_ns = (upper_ns - backward_ns) // 2
            shift_ns = shifts[reference].shift_ns - midpoint_ns
            shifts[clock] = ClockShift(shift_ns, error_ns)
            queue.append(clock)
