"""Lists patches as a text table and reports patches with problems."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from megatron_ext.patches import drift
from megatron_ext.patches.registry import REGISTRY

if TYPE_CHECKING:
    from megatron_ext.patches.point import Row

_LOG = logging.getLogger(__name__)


def import_targets() -> list[str]:
    """Import every module that has targets, to list their state; return the missing ones."""
    missing_modules = []
    # Megatron warns about missing kernels, which matter only for training.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")
        for name in REGISTRY.modules():
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except ImportError as error:
                _LOG.debug("%s cannot be imported: %s", name, error)
                missing_modules.append(name)
    return missing_modules


def _status(row: Row) -> str:
    words: list[str] = [row.state]
    if row.state == "other release":
        words.append(row.releases)
    if row.state == "installed":
        words.append("active" if row.active else "idle")
        words.append("intact" if row.intact else "OVERWRITTEN")
    if row.drift:
        words.append(f"DRIFT: {row.drift}")
    return ", ".join(words)


def text_table(rows: Iterable[Row], *, redirects: bool = False) -> str:
    """Return the patches as text, grouped by feature.

    torch names that a device redirects are only counted unless `redirects` is set.
    """
    lines: list[str] = []
    # `Registry.rows` sorts by feature, as `groupby` requires.
    for feature, group in groupby(rows, key=lambda row: row.feature):
        lines.append(f"{feature}:")
        redirects_by_status: Counter[str] = Counter()
        for row in group:
            # A device redirects many torch names, which would bury the other patches.
            if row.target.startswith("torch") and not redirects:
                redirects_by_status[_status(row)] += 1
                continue
            lines.append(f"  {row.id}  [{row.kind}, order {row.order}; {_status(row)}]")
            lines.append(f"      {row.target}")
            lines.append(f"      {row.reason}")
        if redirects_by_status:
            counts = []
            for status, count in redirects_by_status.items():
                counts.append(f"{count} {status}")
            lines.append(
                f"  {redirects_by_status.total()} torch names redirected ({'; '.join(counts)}); "
                "use --all to list them"
            )
    return "\n".join(lines)


def problems(rows: Iterable[Row]) -> list[str]:
    """Return one line per patch that drifted, was refused, or was overwritten by other code.

    Patches whose package is missing, or whose optional target is missing, are skipped.
    """
    lines = []
    for row in rows:
        difference = _difference(row)
        if difference:
            lines.append(
                f"{row.id}: {row.target} differs from the release: {difference}"
            )
        elif not row.intact:
            lines.append(
                f"{row.id}: {row.target} was overwritten by other code after patching"
            )
    return lines


def _difference(row: Row) -> str:
    """Return how a patch's target differs from its release; empty if that does not matter."""
    # A pending row is a problem only if its module is missing, because a job may never
    # import the module.
    if row.state == "pending" and row.required:
        missing = drift.missing_module(row.target)
        if missing is not None:
            return missing.actual
    if row.state == "absent" and not row.required:
        return ""
    return row.drift
