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
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial, update_wrapper
from itertools import chain
from types import ModuleType
from typing import Any

import wrapt

from megatron_ext.errors import PatchConflict
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
    bound_objects,
    rebind,
)
from megatron_ext.upstream import releases

_LOG = logging.getLogger(__name__)


class Registry:
    """All patches of a process; use the module's `REGISTRY`.

    Args:
        release: The Megatron release whose rows apply; by default the installed one, determined
            when the first row is registered.
    """

    def __init__(self, release: releases.Release | None = None) -> None:
        self.active = False
        self.acted: set[str] = set()
        """Ids of the wraps and replacements that have run in this process (`effects`)."""
        self.undo = ExitStack()
        """What `deactivate` takes back besides the patches: import hooks, the environment."""
        self._given = release
        self._sites: dict[str, Site] = {}
        self._ids: dict[str, list[Patch]] = {}  # all rows, those for other releases too
        self._has_logged = False
        self._hooked: set[str] = set()
        self._copies: list[Copy] = []  # what was mended in other modules
        self._seen: set[str] = set()  # modules that were patched before: arming again is not late

    @cached_property
    def release(self) -> releases.Release | None:
        """The release whose rows apply."""
        return self._given or releases.installed_release()

    def __iter__(self) -> Iterator[Patch]:
        """Iterate over all rows, those for other releases too."""
        return chain.from_iterable(self._ids.values())

    # -- registering and switching ---------------------------------------------------------------

    def register(self, patches: Iterable[Patch]) -> None:
        """Add patches that are not there yet; an active registry arms them immediately.

        Raises:
            ValueError: Two rows for the same release share an id, or a `set` shares its target.
        """
        modules = set()
        for patch in patches:
            others = self._ids.setdefault(patch.id, [])
            if any(known is patch for known in others):
                continue
            for other in others:
                if patch.since < other.until and other.since < patch.until:
                    raise ValueError(f"patch id {patch.id} is taken by {other.target}")
            if patch.is_for(self.release):
                site = self._sites.setdefault(patch.target, Site(patch.target))
                if site.patches and "set" in {patch.kind, site.first.kind}:
                    raise ValueError(
                        f"{patch.target}: a 'set' patch needs the target to itself, but it has "
                        f"{site.first.id} and {patch.id}"
                    )
                site.patches.append(patch)
                modules.add(patch.module)
            others.append(patch)
        if self.active:
            self._arm(modules)

    def activate(self) -> None:
        """Arm every registered patch; modules already imported are patched now. Idempotent."""
        if not self.active:
            self.active = True
            self._arm(set(self.modules()))

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
        # Never our own modules (they keep originals on purpose), torch's internals (they must keep
        # calling the originals) and the library of the proxies.
        mended = rebind(swapped, {"megatron_ext", "torch", "wrapt"})
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
        patch, module = site.first, sys.modules[site.first.module]
        try:
            if patch.creates:
                prefix, _, site.attribute = patch.path.rpartition(".")
                site.parent = wrapt.resolve_path(module, prefix)[2] if prefix else module
            else:
                site.parent, site.attribute, site.original = wrapt.resolve_path(module, patch.path)
        except AttributeError as error:
            site.mismatch = drift.missing(site.target, str(error))
            return False
        site.own = vars(site.parent).get(site.attribute, MISSING)
        site.mismatch = drift.compare(site.target, site.original)
        if patch.kind == "set":
            # Once: a value has no proxy that could check at each call whether its feature is on.
            if patch.acting() is None or drift.refuses(site.mismatch):
                return False
            site.put(patch.fn(None if site.original is MISSING else site.original))
            return True
        own = site.original if site.own is MISSING else site.own
        # References that an undo cannot reach (default arguments, closures, partials) act like the
        # original too: a point checks at each call whether the registry is active.
        site.put(PatchPoint(own, partial(self._dispatch, site), enabled=lambda: self.active))
        return True

    def _uninstall(self, sites: Iterable[Site]) -> None:
        doomed = [site for site in sites if site.is_installed]
        undone = {id(site.installed): site.installed for site in doomed}
        swapped = [(site.installed, site.original) for site in doomed if site.can_be_found]
        for site in doomed:
            site.restore()
        for names, name, old, new in self._copies:
            # Unless other code has rebound the name since.
            if id(new) in undone and names.get(name) is new:
                names[name] = old
        self._copies = [copy for copy in self._copies if id(copy.new) not in undone]
        # Copies that other code has made since too, except of what replaces several originals. Only
        # our own modules, which own the replacements, stay unchanged: torch's may have been
        # imported in between, and its compiler keeps functions of `torch.cuda` in classes.
        count = Counter(new for new, _ in {(id(new), id(old)) for new, old in swapped})
        alone = (pair for pair in swapped if count[id(pair[0])] == 1)
        rebind(alone, {"megatron_ext"}, in_classes=True)

    # -- calling ---------------------------------------------------------------------------------

    def _dispatch(
        self, site: Site, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run one call of a patch point through the patches that are active now."""
        active = [(patch, fn) for patch in site.patches if (fn := patch.acting()) is not None]
        if not active:
            return wrapped(*args, **kwargs)
        if drift.refuses(site.mismatch):
            raise site.mismatch  # type: ignore[misc]
        if len(active) > 1:
            active.sort(key=lambda found: (found[0].kind == "replace", found[0].order, found[0].id))
            replacements = [patch.id for patch, _ in active if patch.kind == "replace"]
            if len(replacements) > 1:
                raise PatchConflict(
                    f"{site.target} has {len(replacements)} active replacements, "
                    f"{', '.join(replacements)}; at most one is allowed: switch off all but one of "
                    "these features"
                )
        for patch, _ in active:
            self.acted.add(patch.id)
        call = wrapped
        for _, fn in active[:0:-1]:
            # All but the outermost, inner ones first: wraps read the parameters of the target.
            call = update_wrapper(partial(_step, fn, call, instance), wrapped)
        return active[0][1](call, instance, args, kwargs)

    # -- looking ---------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return the state of every patch, by feature and id, those for other releases too."""
        rows = map(self._row, self)
        return sorted(rows, key=lambda row: (row.feature, row.id, row.releases))

    def _row(self, patch: Patch) -> Row:
        is_ours = patch.is_for(self.release)
        site = self._sites[patch.target] if is_ours else Site(patch.target)
        loaded = _is_loaded(patch.module)
        wanted = loaded and patch.acting() is not None
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
            **vars(patch),
            state=state,
            intact=site.intact(),
            active=self.active and wanted and site.is_installed,
            drift="" if site.mismatch is None else f"{site.mismatch.found}",
        )

    def raise_mismatches(self) -> None:
        """Refuse to start a run on a Megatron that active patches were not written for.

        With `MEGATRON_EXT_DRIFT=warn` one rank logs one line about the differences. The same rank
        logs once that a release is newer than all known ones, if all patches in use still fit.

        Raises:
            UpstreamMismatch: The first one, unless `MEGATRON_EXT_DRIFT` allows it.
            UserError: The variable has an invalid value, even without a mismatch.
        """
        drift.policy()
        mismatches = []
        for site in self._sites.values():
            mismatch = site.mismatch or drift.missing_module(site.target)
            if mismatch is None:
                continue
            lacks = drift.is_missing(mismatch)
            # A missing target or module counts if a patch that requires it would act.
            relevant = (patch for patch in site.patches if patch.required or not lacks)
            if any(patch.acting() for patch in relevant):
                if drift.refuses(mismatch):
                    raise mismatch
                mismatches.append(mismatch)
        if not self._has_logged:
            self._has_logged = True
            drift.log(mismatches, self.release)

    def modules(self) -> list[str]:
        """Return the names of all patched modules, sorted."""
        return sorted({site.first.module for site in self._sites.values()})


def _is_loaded(name: str) -> bool:
    """Return whether a module is imported to its end; the others get a post-import hook."""
    module = sys.modules.get(name)
    # During its import a module is in sys.modules already, half of it missing.
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _step(fn: Call, call: Call, instance: Any, *args: Any, **kwargs: Any) -> Any:
    return fn(call, instance, args, kwargs)


REGISTRY = Registry()
"""The patches of this process."""
