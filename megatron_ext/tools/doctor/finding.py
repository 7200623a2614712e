"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "fail", "ok", "warn"]

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    """FAIL: the requested training cannot work. WARN: it works, with a disadvantage."""
    check: str
    """The subject of the check, in two or three words."""
    found: str
    remedy: str = ""
    """Remedy; empty if nothing is wrong."""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<4} {self.check}: {self.found}{remedy}"


def ok(check: str, found: str) -> Finding:
    """Return a finding that is good."""
    return Finding("OK", check, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that costs speed or convenience."""
    return Finding("WARN", check, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that stops training."""
    return Finding("FAIL", check, found, remedy)
