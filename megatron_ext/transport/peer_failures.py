"""Which error a failed call of the native transport raises, by what the core knows of the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_ext.errors import (
    PeerAborted,
    PeerClosed,
    PeerDied,
    TransportError,
    TransportTimeout,
)

if TYPE_CHECKING:
    from megatron_ext.transport._C import PeerReport

__all__ = ["failure_of"]


def failure_of(
    what: str,
    peer: int,
    reports: Sequence[PeerReport],
    cause: float | TransportError,
    hosts: Mapping[int, str],
    slots: int,
) -> TransportError:
    """Return the exception of a failed call, by the state of `peer` first, then of the others.

    A peer that aborted or died explains the failure, of whichever rank it is; one that closed its
    transport only if the call depended on it. Otherwise the call's own cause counts.

    Args:
        what: The failure, the beginning of the error message.
        peer: Global rank that the call depended on.
        reports: State of the link to each peer.
        cause: The time-out in seconds, or the core's error.
        hosts: Host name of each peer, by global rank.
        slots: Messages of each peer that have room here.
    """

    def place(report: PeerReport) -> str:
        return f"rank {report.rank} on host {hosts[report.rank]} (wire {report.wire})"

    # `peer` first: its end may have caused that of the others.
    reports = sorted(reports, key=lambda report: report.rank != peer)
    for report in reports:
        if report.state == "aborted":
            return PeerAborted(f"{what}; {place(report)} gave up: {report.reason}")
    for report in reports:
        why = f" ({report.reason})" if report.reason else ""
        if report.state == "died":
            return PeerDied(f"{what}; {place(report)} died{why}")
        if report.state == "closed" and report.rank == peer:
            return PeerClosed(f"{what}; {place(report)} closed its transport")
    if isinstance(cause, TransportError):
        return TransportError(f"{what}: {cause}")
    links = "; ".join(
        f"{place(report)} is {report.state}: {report.num_arrived} messages arrived but not "
        f"received, {report.num_held} of {slots} slots in use, {report.num_queued} messages queued "
        f"for it"
        for report in reports
    )
    return TransportTimeout(f"{what} of {cause:g} s; {links or 'there are no peers'}")
