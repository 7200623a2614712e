"""The patch registry: every change that this package makes to another package, in one place.

A `Patch` defines what changes, why and when. `Patch.kind` selects one of two mechanisms:

* `wrap` and `replace` put exactly one `PatchPoint` (a wrapt proxy) on a function or method. At each
  call it builds the chain of the patches that are active *now*: at most one replacement, innermost,
  and the wraps around it by `(order, id)`. No active patch: the original runs.
* `set` assigns a value once. It is for constants and for functions too hot for a proxy.

The technique (post-import hooks, transparent proxies) is wrapt's; see its documentation on monkey
patching for the background.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial, update_wrapper
from types import ModuleType
from typing import Any

import wrapt

from megatron_ext.errors import PatchConflict, UpstreamMismatch
from megatron_ext.patches import drift
from megatron_ext.patches.point import (
    MISSING,
    Args,
    Call,
    Copy,
    Kwargs,
    Patch,
    PatchPoint,
    Row,
    Site,
    State,
    always,
    bound_objects,
    by_name,
    replace_aliases,
    restore_aliases,
)
from megatron_ext.upstream import releases

__all__ = ["REGISTRY", "Args", "Call", "Kwargs", "Patch", "Registry", "Row", "always", "by_name"]

_LOG = logging.getLogger(__name__)


class Registry:
    """All patches of a process; use the module's `REGISTRY`.

    Args:
        release: The Megatron release whose rows apply; by default the installed one, determined
            when the first row is registered.
    """

    def __init__(self, release: releases.Release | None = None) -> None:
        self.active = False
        self._given = release
        self._sites: dict[str, Site] = {}
        self._ids: dict[str, list[Patch]] = {}  # all rows, those for other releases too
        self._has_logged = False
        self.acted: set[str] = set()
        """Ids of the wraps and replacements that have run in this process (`effects`)."""
        self.undo = ExitStack()
        """What `deactivate` takes back besides the patches (`patches/device.py`)."""
        self._hooked: set[str] = set()
        self._copies: list[Copy] = []  # what was mended in other modules
        self._seen: set[str] = set()  # modules that were patched before: arming again is not late

    @cached_property
    def release(self) -> releases.Release | None:
        """The release whose rows apply."""
        return self._given or releases.installed_release()

    def _rows_of_all_releases(self) -> Iterator[Patch]:
        for patches in self._ids.values():
            yield from patches

    def _patches(self) -> Iterator[Patch]:
        """Yield the rows that apply."""
        return (patch for patch in self._rows_of_all_releases() if patch.is_for(self.release))

    def __contains__(self, patch: Patch) -> bool:
        """Return whether a patch is registered."""
        return any(known is patch for known in self._ids.get(patch.id, ()))

    # -- registering and switching ---------------------------------------------------------------

    def register(self, patches: Iterable[Patch]) -> None:
        """Add patches; an active registry arms them immediately.

        Raises:
            ValueError: Two rows for the same release share an id, a `requires` is unknown, or a
                `set` shares its target.
        """
        new = list(patches)
        for patch in new:
            self._add(patch)
        for patch in new:
            unknown = [i for i in (*patch.requires, *patch.conflicts) if i not in self._ids]
            if unknown:
                raise ValueError(f"patch {patch.id} names unknown patches {unknown}")
        if self.active:
            self._arm({patch.module for patch in new if patch.is_for(self.release)})

    def _add(self, patch: Patch) -> None:
        for other in self._ids.get(patch.id, ()):
            if patch.overlaps(other):
                raise ValueError(f"patch id {patch.id} is taken by {other.target}")
        if not patch.is_for(self.release):
            self._ids.setdefault(patch.id, []).append(patch)
            return
        site = self._sites.setdefault(patch.target, Site(patch.target))
        if site.patches and "set" in {patch.kind, site.first.kind}:
            raise ValueError(
                f"{patch.target}: a 'set' patch needs the target to itself, but it has "
                f"{site.first.id} and {patch.id}"
            )
        self._ids.setdefault(patch.id, []).append(patch)
        site.patches.append(patch)

    def remove(self, ids: Iterable[str]) -> None:
        """Undo and remove patches (another device, the end of a test)."""
        doomed = set(ids)
        sites = [s for s in self._sites.values() if any(p.id in doomed for p in s.patches)]
        self._uninstall(sites)
        for site in sites:
            site.patches = [p for p in site.patches if p.id not in doomed]
            if not site.patches:
                del self._sites[site.target]
        for patch_id in doomed:
            self._ids.pop(patch_id, None)
        if self.active:
            self._arm({site.first.module for site in sites if site.patches})

    def activate(self) -> None:
        """Arm every registered patch; modules already imported are patched now. Idempotent."""
        if not self.active:
            self.active = True
            self._arm({patch.module for patch in self._patches()})

    def deactivate(self) -> None:
        """Restore every original, aliases included; patches stay registered. Idempotent."""
        # Points that an undo cannot reach ask this flag at each call, so it comes first.
        self.active = False
        self._uninstall(self._sites.values())
        self.undo.close()

    # -- installing ------------------------------------------------------------------------------

    def _arm(self, modules: set[str]) -> None:
        """Install into loaded modules, and hook the import of the others."""
        loaded = {name for name in modules if _is_loaded(name)}
        self._install(loaded, late=True)
        # Right after a module has executed no other code can have copied its names yet.
        # Hooks cannot be taken back: there is one for each module, and it asks whether to act.
        for name in modules - loaded - self._hooked:
            self._hooked.add(name)
            wrapt.register_post_import_hook(partial(self._imported, name), name)

    def _imported(self, name: str, _module: ModuleType) -> None:
        self._hooked.discard(name)
        self._seen.add(name)
        if self.active:
            self._install({name}, late=False)

    def _install(self, modules: set[str], *, late: bool) -> None:
        """Install all sites of some loaded modules; when late, repair copies of the names too."""
        wanted = [
            site
            for site in self._sites.values()
            if site.first.module in modules and not site.is_installed
        ]
        constants = any(site.first.kind == "set" for site in wanted)
        bound = bound_objects() if constants else set()  # patch points are new in any case
        installed = [site for site in wanted if self._install_site(site)]
        for site in installed:
            site.is_shared = id(site.installed) in bound
        swapped = [(site.original, site.installed) for site in installed if site.spreads]
        if not late or not swapped:
            return
        mended = replace_aliases(swapped)
        self._copies += mended
        megatron = {m for m in modules if m.startswith("megatron.")} - self._seen
        self._seen |= megatron
        if megatron:
            _LOG.warning(
                "%s imported before megatron_ext: %d copied names mended; copies in closures, "
                "partials and default arguments cannot be. Put `import megatron_ext` first.",
                "1 module was" if len(megatron) == 1 else f"{len(megatron)} modules were",
                len(mended),
            )

    def _install_site(self, site: Site) -> bool:
        """Install one site; keep a mismatch for `raise_mismatches`: imports must not fail."""
        site.mismatch = None
        try:
            self._resolve(site)
        except UpstreamMismatch as error:
            site.mismatch = error
            _LOG.debug("patch target is not as expected: %s", error)
            return False
        # Once and for all: a value has no proxy that could check at each call whether its feature
        # is on.
        if site.first.kind == "set":
            if not site.first.when() or drift.refuses(site.mismatch):
                return False
            site.put(site.first.fn(None if site.original is MISSING else site.original))
        else:
            # References that an undo cannot reach (default arguments, closures, partials) act like
            # the original too: a point checks at each call whether the registry is active.
            site.put(
                PatchPoint(site.own, partial(self._dispatch, site), enabled=lambda: self.active)
            )
        return True

    def _resolve(self, site: Site) -> None:
        """Find the target and compare it with the pin; a missing one is an `UpstreamMismatch`."""
        module = sys.modules[site.first.module]
        try:
            if site.first.creates:
                prefix, _, site.attribute = site.first.path.rpartition(".")
                site.parent = wrapt.resolve_path(module, prefix)[2] if prefix else module
                site.original = MISSING
            else:
                site.parent, site.attribute, site.original = wrapt.resolve_path(
                    module, site.first.path
                )
        except AttributeError as error:
            raise drift.missing(site.target, str(error)) from error
        site.own = vars(site.parent).get(site.attribute, MISSING)
        if site.first.kind != "set" and site.own is MISSING:
            site.own = site.original
        site.mismatch = drift.compare(site.target, site.original)

    def _uninstall(self, sites: Iterable[Site]) -> None:
        doomed = [site for site in sites if site.is_installed]
        undone = {id(site.installed): site.installed for site in doomed}
        swapped = [(site.installed, site.original) for site in doomed if site.can_be_found]
        for site in doomed:
            site.restore()
        for copy in self._copies:
            if id(copy.new) in undone:
                copy.restore()
        self._copies = [copy for copy in self._copies if id(copy.new) not in undone]
        restore_aliases(swapped)

    # -- calling ---------------------------------------------------------------------------------

    def _dispatch(
        self,
        site: Site,
        wrapped: Callable[..., Any],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call of a patch point through the patches that are active now."""
        active = [patch for patch in site.patches if patch.when()]
        if not active:
            return wrapped(*args, **kwargs)
        if drift.refuses(site.mismatch):
            raise site.mismatch  # type: ignore[misc]
        if len(active) > 1:
            _check_conflicts(site.target, active)
            active.sort(key=lambda patch: (patch.kind == "replace", patch.order, patch.id))
        for patch in active:
            self.acted.add(patch.id)
        call = wrapped
        for patch in active[:0:-1]:
            # All but the outermost, inner ones first: the wraps around them read the parameters of
            # the target.
            call = update_wrapper(partial(_step, patch.fn, call, instance), wrapped)
        return active[0].fn(call, instance, args, kwargs)

    # -- looking ---------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return the state of every patch, by feature and id, those for other releases too."""
        rows = map(self._row, self._rows_of_all_releases())
        return sorted(rows, key=lambda row: (row.feature, row.id, row.releases))

    def _row(self, patch: Patch) -> Row:
        is_ours = patch.is_for(self.release)
        site = self._sites[patch.target] if is_ours else Site(patch.target)
        loaded = _is_loaded(patch.module)
        wanted = bool(patch.when()) if loaded else False
        state: State = "refused"
        if not is_ours:
            state = "other release"
        elif not self.active:
            state = "off"
        elif not loaded:
            state = "pending"
        elif site.is_installed:
            state = "installed"
        elif site.mismatch is None:
            state = "skipped"
        elif drift.is_missing(site.mismatch) and not (patch.required and wanted):
            state = "absent"
        return Row(
            id=patch.id,
            target=patch.target,
            kind=patch.kind,
            feature=patch.feature,
            order=patch.order,
            state=state,
            intact=site.intact(),
            active=self.active and wanted and site.is_installed,
            drift="" if site.mismatch is None else f"{site.mismatch.found}",
            reason=patch.reason,
            releases=patch.releases,
            required=patch.required,
        )

    def mismatches(self) -> list[UpstreamMismatch]:
        """Return the mismatches at targets of patches that would act now.

        A missing target or module counts if a patch that requires it would act.
        """
        found = []
        for site in self._sites.values():
            mismatch = site.mismatch or drift.missing_module(site.target)
            if mismatch is None:
                continue
            lacks = drift.is_missing(mismatch)
            if any(patch.when() for patch in site.patches if patch.required or not lacks):
                found.append(mismatch)
        return found

    def raise_mismatches(self) -> None:
        """Refuse to start a run on a Megatron that active patches were not written for.

        With `MEGATRON_EXT_DRIFT=warn` one rank logs one line about the differences. The same rank
        logs once that a release is newer than all known ones, if all patches in use still fit.

        Raises:
            UpstreamMismatch: The first of `mismatches()`, unless `MEGATRON_EXT_DRIFT` allows it.
            UserError: The variable has an invalid value, even without a mismatch.
        """
        drift.policy()
        mismatches = self.mismatches()
        for mismatch in mismatches:
            if drift.refuses(mismatch):
                raise mismatch
        if not self._has_logged:
            self._has_logged = True
            drift.log(mismatches, self.release)

    def ids(self, feature: str) -> list[str]:
        """Return the ids of all rows of a feature."""
        return [patch.id for patch in self._rows_of_all_releases() if patch.feature == feature]

    def sites(self) -> list[Site]:
        """Return the targets that are patched now."""
        return [site for site in self._sites.values() if site.is_installed]

    def originals(self) -> dict[str, Any]:
        """Return the original object of every installed target, for tests and for debugging."""
        return {t: s.original for t, s in self._sites.items() if s.is_installed}

    def modules(self) -> list[str]:
        """Return the names of all patched modules, sorted."""
        return sorted({patch.module for patch in self._patches()})

    def targets(self) -> list[str]:
        """Return all targets that exist upstream, sorted."""
        return sorted(t for t, site in self._sites.items() if not site.first.creates)


def _is_loaded(name: str) -> bool:
    """Return whether a module is imported to its end; the others get a post-import hook."""
    module = sys.modules.get(name)
    # During its import a module is in sys.modules already, half of it missing.
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _step(
    fn: Callable[..., Any], call: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any
) -> Any:
    return fn(call, instance, args, kwargs)


def _check_conflicts(target: str, active: list[Patch]) -> None:
    replacements = [patch.id for patch in active if patch.kind == "replace"]
    if len(replacements) > 1:
        raise PatchConflict(
            f"{target} has {len(replacements)} active replacements, {', '.join(replacements)}; at "
            f"most one is allowed: switch off all but one of these features"
        )
    ids = {patch.id for patch in active}
    for patch in active:
        for other in ids.intersection(patch.conflicts):
            raise PatchConflict(
                f"{target}: {patch.id} cannot be active together with {other}; switch one off"
            )


REGISTRY = Registry()
"""The patches of this process."""
