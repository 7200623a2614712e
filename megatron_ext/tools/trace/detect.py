"""Finds slow ranks and links.

A rank is slow if its actions take longer than the same actions on most others. Stages differ, so a
rank is compared with those of the same stage; if a stage has only one rank, with the mean of all
stages. A link is slow if its messages take longer than those of most links.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.tools.trace.aggregate import Run
    from megatron_ext.tools.trace.survey import Link, MessageKey, RankSurvey

__all__ = ["SLOW_LINK", "SLOW_RANK", "Finding", "LinkSpeed", "detect", "link_speeds", "slowness"]

SLOW_RANK, SLOW_LINK = 1.2, 2.0
"""Times the median from which a rank, or a link, is slow."""


@dataclass(frozen=True)
class Finding:
    """A slow rank or link, with its factor."""

    what: str
    factor: float

    def __str__(self) -> str:
        return f"slow {self.what}: {self.factor:.2f} x the median"


@dataclass(frozen=True)
class LinkSpeed:
    """An ordered pair of ranks that exchange messages."""

    source: int
    target: int
    link: Link
    delay_ns: int | None
    """Median from the begin of a send to the end of its receive, of messages that were waited for;
    None: both ends of no such message are known."""

    @property
    def bytes_per_s(self) -> float | None:
        """Size of a message by its time under way."""
        if not self.delay_ns or not self.link.messages:
            return None
        return self.link.bytes / self.link.messages / self.delay_ns * 1e9


def detect(run: Run) -> list[Finding]:
    """Return slow ranks and links, worst first."""
    found = [
        Finding(f"rank {rank}", factor)
        for rank, factor in slowness(run.surveys).items()
        if factor >= SLOW_RANK
    ]
    speeds = [(speed, speed.delay_ns) for speed in link_speeds(run)]
    delays = [delay for _, delay in speeds if delay is not None]
    middle = statistics.median_low(delays) if delays else 0
    for speed, delay in speeds:
        if delay is not None and middle > 0 and delay >= SLOW_LINK * middle:
            what = f"link from rank {speed.source} to rank {speed.target}"
            found.append(Finding(what, delay / middle))
    return sorted(found, key=lambda finding: -finding.factor)


def slowness(surveys: Iterable[RankSurvey]) -> dict[int, float]:
    """Return how long each rank's actions take, 1 for the median of those that it compares with."""
    surveys = list(surveys)
    by_stage: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    by_name: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for survey in surveys:
        for (name, stage), sample in survey.actions.items():
            by_stage[name, stage][survey.header.rank] = sample.median_ns
            by_name[name][survey.header.rank].append(sample.median_ns)
    factors: dict[int, list[float]] = defaultdict(list)
    for (name, _), peers in by_stage.items():
        # Two ranks do not tell which of them is the slow one.
        alone = len(peers) < 3
        means = {rank: statistics.fmean(found) for rank, found in by_name[name].items()}
        times = means if alone else peers
        middle = statistics.median_low(times.values())
        for rank in peers if middle else ():
            factors[rank].append(times[rank] / middle)
    return {rank: statistics.fmean(found) for rank, found in sorted(factors.items())}


def link_speeds(run: Run) -> list[LinkSpeed]:
    """Return every pair of ranks that exchanged messages, the longest waited for first."""
    sent: dict[MessageKey, int] = {}
    for survey in run.surveys:
        shift = run.alignment.of(survey.header)
        for key, (begin, _) in survey.stamps.items():
            if key.source == survey.header.rank:
                sent[key] = begin + shift
    found = []
    for survey in run.surveys:
        shift = run.alignment.of(survey.header)
        delays: dict[int, list[int]] = defaultdict(list)
        for key in survey.waited:
            if key in sent and key.target == survey.header.rank:
                delays[key.source].append(survey.stamps[key][1] + shift - sent[key])
        for source, link in survey.links.items():
            delay = max(0, statistics.median_low(delays[source])) if delays[source] else None
            found.append(LinkSpeed(source, survey.header.rank, link, delay))
    return sorted(found, key=lambda speed: -speed.link.waited_ns)
