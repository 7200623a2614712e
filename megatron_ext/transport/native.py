"""Access to the native core, which may not be installed.

If there was no working C++ compiler at install time, `megatron_ext.transport._C` is missing. All
other modules import the core through this one, so a missing core raises an error with a remedy
instead of a bare ImportError.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import NamedTuple

from megatron_ext.errors import TransportError

_log = logging.getLogger(__name__)

_MODULE = "megatron_ext.transport._C"
_REMEDY = (
    "Install a C++17 compiler and Python's headers (Debian: apt-get install g++ python3-dev), "
    "then install megatron_ext again with MEGATRON_EXT_REQUIRE_NATIVE=1 set, which makes pip stop "
    "with the compiler's message if the build still fails"
)


def require_native() -> ModuleType:
    """Return the native core, `megatron_ext.transport._C` (its interface: `_C.pyi`).

    Raises:
        TransportError: The core is not installed or cannot be loaded; the error includes a remedy.
    """
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        raise TransportError(
            f"The native module {_MODULE} is not usable: {error}. {_REMEDY}."
        ) from error


class RdmaProbe(NamedTuple):
    """Whether this host can use RDMA."""

    usable: bool
    finding: str
    """The port that links will use, or the failed step and its error."""
    remedy: str = ""

    @property
    def why_not(self) -> str:
        """The finding and its remedy, in one line; empty if this host can use RDMA."""
        if self.usable:
            return ""
        return "; ".join(filter(None, [self.finding, self.remedy]))


def probe_rdma(address: str | None = None, *, sysfs: str = "/sys") -> RdmaProbe:
    """Probe everything that an RDMA link needs: libibverbs, port, GID, memory, loopback.

    Args:
        address: IP address that the port must have (see `--node-ips`); if None, the best port is
            used.
        sysfs: Mount point of sysfs; tests pass another directory.

    Raises:
        TransportError: The address or a MEGATRON_EXT_IB_* variable is malformed. Missing hardware
            and missing libraries are reported as findings instead, because `auto` probes every
            machine, and most have no RDMA.
    """
    try:
        probe_steps = require_native().probe_rdma(address or "", sysfs)
    except TransportError as error:
        return RdmaProbe(False, f"native module: {error}")
    except ValueError as error:
        raise TransportError(str(error)) from error
    findings = "; ".join(f"{step.step}: {step.text}" for step in probe_steps)
    _log.debug("RDMA: %s", findings)
    last = probe_steps[-1]  # the first step that failed, if any did
    if not last.is_good:
        return RdmaProbe(False, f"{last.step}: {last.text}", last.remedy)
    port = next(step.text for step in probe_steps if step.step == "port")
    return RdmaProbe(True, port)
