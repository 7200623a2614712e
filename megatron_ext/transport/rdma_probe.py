"""A probe that finds whether this host can use RDMA, and if not, the reason and a remedy.

The native core tries each step: it opens libibverbs, lists devices, chooses a port and a GID,
registers memory and connects a queue pair to itself. It needs no peer and leaves nothing open.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeStep:
    """The result of one step."""

    step: str
    """One of native module, library, devices, port, memory and queue pair."""
    usable: bool
    """Whether the step succeeded."""
    text: str
    """The finding, in words."""
    remedy: str = ""
    """The remedy; empty if the step succeeded or there is none."""

    def __str__(self) -> str:
        """Return the finding and its remedy in one line."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.step}: {self.text}{remedy}"


@dataclass(frozen=True)
class ProbeResult:
    """The findings of all steps tried, in order. The first failure is the last finding."""

    findings: tuple[ProbeStep, ...]

    @property
    def usable(self) -> bool:
        """Whether this host can use RDMA links."""
        return self.findings[-1].usable

    @property
    def reason(self) -> str:
        """The port to be used, or the reason for failure, in one line."""
        if not self.usable:
            return str(self.findings[-1])
        return next(finding.text for finding in self.findings if finding.step == "port")


def probe(address: str | None = None, *, sysfs: str = "/sys") -> ProbeResult:
    """Try every step of opening an RDMA link.

    Args:
        address: IP address of this host that the port must have (see `--node-ips`). None: the best
            port is chosen.
        sysfs: Mount point of sysfs; another directory in tests.

    Returns:
        The findings. A missing library, device or port is a finding, not an exception.

    Raises:
        TransportError: The address or a variable MEGATRON_EXT_IB_* is malformed.
    """
    # A finding and not an error: `auto` asks on every machine, most of which have no RDMA.
    try:
        native = require_native()
    except TransportError as error:
        return ProbeResult((ProbeStep("native module", False, str(error)),))
    try:
        found = native.probe_rdma(address or "", sysfs)
    except ValueError as error:
        raise TransportError(str(error)) from error
    findings = tuple(ProbeStep(item.step, item.is_good, item.text, item.remedy) for item in found)
    result = ProbeResult(findings)
    _log.debug("RDMA: %s", "; ".join(str(finding) for finding in findings))
    return result
