"""State of each patch, as the rows of `patches list` and `report()`."""

from __future__ import annotations

import sys

from megatron_ext.patches import drift
from megatron_ext.patches.point import Patch, Row, Site, State

__all__ = ["is_loaded", "row_of"]


def row_of(patch: Patch, site: Site | None, *, armed: bool) -> Row:
    """Return the state of a patch.

    Args:
        patch: The patch.
        site: Its target; None if it is for other releases.
        armed: Whether the registry is active.
    """
    loaded = is_loaded(patch.module)
    wanted = bool(patch.when()) if loaded else False
    place = site or Site(patch.target)
    return Row(
        id=patch.id,
        target=patch.target,
        kind=patch.kind,
        feature=patch.feature,
        order=patch.order,
        state=_state(patch, site, armed=armed, loaded=loaded, wanted=wanted),
        intact=place.intact(),
        active=armed and wanted and place.is_installed,
        drift="" if place.mismatch is None else f"{place.mismatch.found}",
        reason=patch.reason,
        releases=patch.releases,
        required=patch.required,
    )


def _state(patch: Patch, site: Site | None, *, armed: bool, loaded: bool, wanted: bool) -> State:
    if site is None:
        return "other release"
    if not armed:
        return "off"
    if not loaded:
        return "pending"
    if site.is_installed:
        return "installed"
    if site.mismatch is None:
        return "skipped"
    if drift.is_missing(site.mismatch) and not (patch.required and wanted):
        return "absent"
    return "refused"


def is_loaded(name: str) -> bool:
    """Whether a module is imported to its end (one being executed gets its post-import hook)."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)
