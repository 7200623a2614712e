"""Aligns the clocks of different hosts.

Ranks of one host share a clock. Messages relate two clocks: if one was sent at `s` on the sender's
clock and arrived at `r` on the receiver's, the receiver's is ahead by at most `r - s`. The smallest
such difference in each direction bounds the offset from both sides; the midpoint is the estimate,
as in NTP. Hosts that exchange no messages are related through others that do, or else through the
time since 1970 that each rank recorded at its start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.tools.trace.survey import MessageKey, RankSurvey
    from megatron_ext.tracing.records import Header

__all__ = ["Alignment", "align"]


@dataclass(frozen=True)
class Alignment:
    """Offset to add to the times of each clock, in nanoseconds, with its uncertainty."""

    offset_ns: Mapping[str, int]
    error_ns: Mapping[str, int | None]
    """Half of the distance between the two bounds; None: by the time since 1970."""

    def of(self, header: Header) -> int:
        """Return what to add to the times of a rank."""
        return self.offset_ns[clock_of(header)]

    def notes(self) -> list[str]:
        """Describe the alignment of each clock; empty if there is only one."""
        if len(self.offset_ns) == 1:
            return []
        lines = []
        for clock, error in self.error_ns.items():
            how = "by the time of day" if error is None else f"+- {error / 1e3:.0f} us by messages"
            offset_ms = self.offset_ns[clock] / 1e6
            lines.append(f"clock {clock or 'unnamed'}: {offset_ms:+.3f} ms, {how}")
        return lines


def clock_of(header: Header) -> str:
    """Return the clock of a rank; one that names none has its own."""
    return header.clock or f"rank {header.rank}"


def align(surveys: Iterable[RankSurvey]) -> Alignment:
    """Return what to add to each clock so that all agree with that of the lowest rank."""
    ranks = {survey.header.rank: survey for survey in surveys}
    headers = {clock_of(ranks[r].header): ranks[r].header for r in sorted(ranks, reverse=True)}
    reference = clock_of(ranks[min(ranks)].header)
    bounds = _bounds(ranks)
    offsets, errors = {reference: 0}, {reference: 0 if len(headers) > 1 else None}
    waiting = [reference]
    while waiting:
        known = waiting.pop(0)
        for (ahead, clock), bound in sorted(bounds.items()):
            back = bounds.get((clock, ahead))
            if ahead != known or clock in offsets or back is None:
                continue
            # clock - known is at most `bound`, and at least `-back`.
            offsets[clock] = offsets[known] - (bound - back) // 2
            errors[clock] = (errors[known] or 0) + max(0, bound + back) // 2
            waiting.append(clock)
    here = headers[reference]
    for clock, header in headers.items():
        if clock not in offsets:
            shift = (header.wall_ns - header.clock_ns) - (here.wall_ns - here.clock_ns)
            offsets[clock] = shift if header.wall_ns and here.wall_ns else 0
            errors[clock] = None
    return Alignment(offsets, errors)


def _bounds(ranks: Mapping[int, RankSurvey]) -> dict[tuple[str, str], int]:
    """By (sender's clock, receiver's clock): the smallest time between send and receive."""
    sent: dict[MessageKey, int] = {}
    for survey in ranks.values():
        for key, (begin, _) in survey.stamps.items():
            if key.source == survey.header.rank:
                sent[key] = begin
    bounds: dict[tuple[str, str], int] = defaultdict(lambda: 1 << 62)
    for survey in ranks.values():
        mine = clock_of(survey.header)
        for key, (_, end) in survey.stamps.items():
            if key.target != survey.header.rank or key not in sent:
                continue
            theirs = clock_of(ranks[key.source].header)
            if mine != theirs:
                pair = theirs, mine
                bounds[pair] = min(bounds[pair], end - sent[key])
    return dict(bounds)
