"""The patch registry: every change that this package makes to another package, in one place.

A `Patch` defines what changes, why and when. `Patch.kind` selects one of two mechanisms:

* `wrap` and `replace` put one `PatchPoint` (a wrapt proxy) on a function or method. On every call,
  the point chains the patches that are active *now*: at most one replacement, which is innermost,
  and the wraps around it, ordered by `(order, id)`. If no patch is active, the original runs.
* `set` assigns a value once. Use it for constants and for functions that are called too often for a
  proxy.

The technique (post-import hooks, transparent proxies) comes from wrapt; for background, see its
documentation on monkey patching.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial, update_wrapper
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ref

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

if TYPE_CHECKING:
    from megatron_ext.errors import UpstreamMismatch

_LOG = logging.getLogger(__name__)


class Registry:
    """All patches in a process; use the module's `REGISTRY`.

    Args:
        release: The Megatron release whose rows apply. None means the installed release, which is
            determined when the first row is registered.
    """

    def __init__(self, release: releases.Release | None = None) -> None:
        self.active = False
        self.acted: set[str] = set()
        """Ids of the wraps and replacements that have run in this process (used by `effects`)."""
        self.undo = ExitStack()
        """Other changes that `deactivate` reverts: import hooks, environment variables."""
        self._undo_by_object: dict[int, tuple[ref[Any], Callable[[Any], None]]] = {}
        """Id of an object that lives -> its reference, and how to undo its change."""
        self._release_override = release
        self._sites: dict[str, Site] = {}
        # All rows, including those for other releases.
        self._ids: dict[str, list[Patch]] = {}
        self._has_logged = False
        self._hooked: set[str] = set()
        self._rebound_copies: list[Copy] = []
        # Modules that were patched before, so arming them again does not count as late.
        self._patched_modules: set[str] = set()

    @cached_property
    def release(self) -> releases.Release | None:
        """The release whose rows apply."""
        return self._release_override or releases.installed_release()

    def __iter__(self) -> Iterator[Patch]:
        """Iterate over all rows, including those for other releases."""
        return chain.from_iterable(self._ids.values())

    # -- registering and switching ---------------------------------------------------------------

    def register(self, patches: Iterable[Patch]) -> None:
        """Add the patches that are not registered yet; an active registry arms them immediately.

        Raises:
            ValueError: Two rows for the same release share an id, or a `set` shares its target.
        """
        modules = set()
        for patch in patches:
            same_id = self._ids.setdefault(patch.id, [])
            if any(registered is patch for registered in same_id):
                continue
            # Rows may share an id if their release ranges do not overlap.
            for registered in same_id:
                if patch.since < registered.until and registered.since < patch.until:
                    raise ValueError(
                        f"patch id {patch.id} is taken by {registered.target}"
                    )
            if patch.is_for(self.release):
                self._add_to_site(patch)
                modules.add(patch.module)
            same_id.append(patch)
        if self.active:
            self._arm(modules)

    def _add_to_site(self, patch: Patch) -> None:
        site = self._sites.setdefault(patch.target, Site(patch.target))
        if site.patches and "set" in {patch.kind, site.first.kind}:
            raise ValueError(
                f"{patch.target}: a 'set' patch needs the target to itself, but it has "
                f"{site.first.id} and {patch.id}"
            )
        site.patches.append(patch)

    def activate(self) -> None:
        """Arm all registered patches and patch any modules already imported. Idempotent."""
        if not self.active:
            self.active = True
            self._arm(set(self.modules()))

    def deactivate(self) -> None:
        """Restore all originals, including aliases; the patches stay registered. Idempotent."""
        # Set this first: points that an undo cannot reach check the flag on every call.
        self.active = False
        self._uninstall(self._sites.values())
        self.undo.close()
        for reference, undo in list(self._undo_by_object.values()):
            changed = reference()
            if changed is not None:
                undo(changed)
        self._undo_by_object.clear()

    def undo_change(self, changed: object, undo: Callable[[Any], None]) -> None:
        """Let `deactivate` undo a change to one of the program's objects, if that still exists.

        Programs may create such an object in every micro-batch, so it is not kept alive, and
        nothing is kept of it once it is gone.
        """
        key = id(changed)

        def forget(_: ref[Any]) -> None:
            self._undo_by_object.pop(key, None)

        self._undo_by_object[key] = ref(changed, forget), undo

    # -- installing ------------------------------------------------------------------------------

    def _arm(self, modules: set[str]) -> None:
        """Install into loaded modules and hook the import of all others."""
        loaded = {name for name in modules if _is_loaded(name)}
        self._install(loaded, late=True)
        # Hook the import: right after a module has executed, no other code can have
        # copied its names yet. Hooks cannot be removed, so each module gets only one,
        # which checks whether the registry is active.
        for name in modules - loaded - self._hooked:
            self._hooked.add(name)
            wrapt.register_post_import_hook(partial(self._imported, name), name)

    def _imported(self, name: str, _module: ModuleType) -> None:
        self._hooked.discard(name)
        self._patched_modules.add(name)
        if self.active:
            self._install({name}, late=False)

    def _install(self, modules: set[str], *, late: bool) -> None:
        """Install all sites in these loaded modules; if late, also repair copies of the names."""
        pending_sites = []
        for site in self._sites.values():
            if site.first.module in modules and not site.is_installed:
                pending_sites.append(site)
        # Only a `set` value can already be bound in other modules; a patch point is
        # new. Collecting the ids means sweeping all modules, so skip that if there is
        # no `set`.
        bound_ids: set[int] = set()
        if any(site.first.kind == "set" for site in pending_sites):
            bound_ids = bound_objects()
        replaced = []
        for site in pending_sites:
            if not self._install_site(site):
                continue
            site.is_shared = id(site.installed) in bound_ids
            if site.spreads:
                replaced.append((site.original, site.installed))
        if late and replaced:
            self._repair_copies(replaced, modules)

    def _repair_copies(
        self, replaced: list[tuple[Any, Any]], modules: set[str]
    ) -> None:
        """Rebind copies of replaced names in loaded modules.

        Args:
            replaced: `(original, patched)` values.
            modules: Names of the modules that define the originals.
        """
        # Skip our own modules (which deliberately keep the originals), torch's
        # internals (which must keep calling the originals) and the proxy library.
        rebound = rebind(replaced, {"megatron_ext", "torch", "wrapt"})
        self._rebound_copies += rebound
        late_modules = {name for name in modules if name.startswith("megatron.")}
        late_modules -= self._patched_modules
        self._patched_modules |= late_modules
        if late_modules:
            modules_text = f"{len(late_modules)} modules were"
            if len(late_modules) == 1:
                modules_text = "1 module was"
            _LOG.warning(
                "%s imported before megatron_ext: %d copied names were replaced, but copies in "
                "closures, partials and default arguments cannot be; put `import megatron_ext` "
                "first",
                modules_text,
                len(rebound),
            )

    def _install_site(self, site: Site) -> bool:
        """Install one site; keep any mismatch for `raise_mismatches`: imports must not fail."""
        patch = site.first
        module = sys.modules[patch.module]
        try:
            if patch.creates:
                prefix, _, site.attribute = patch.path.rpartition(".")
                site.parent = module
                if prefix:
                    _, _, site.parent = wrapt.resolve_path(module, prefix)
            else:
                site.parent, site.attribute, site.original = wrapt.resolve_path(
                    module, patch.path
                )
        except AttributeError as error:
            site.mismatch = drift.missing(site.target, str(error))
            return False
        site.defined = vars(site.parent).get(site.attribute, MISSING)
        site.mismatch = drift.compare(site.target, site.original)
        if patch.kind == "set":
            # Decide now: unlike a point, a value cannot check on every call whether its
            # feature is on.
            if patch.acting() is None or drift.refuses(site.mismatch):
                return False
            original = None
            if site.original is not MISSING:
                original = site.original
            site.put(patch.fn(original))
            return True
        # Prefer the parent's own attribute: a lookup would bind a static or class method.
        wrapped = site.defined
        if site.defined is MISSING:
            wrapped = site.original
        dispatch = partial(self._dispatch, site)
        # The point checks on every call whether the registry is active: after an undo,
        # references that cannot be reached (default arguments, closures, partials) must
        # behave like the original.
        point = PatchPoint(wrapped, dispatch, enabled=lambda: self.active)
        site.put(point)
        return True

    def _uninstall(self, sites: Iterable[Site]) -> None:
        installed_sites = [site for site in sites if site.is_installed]
        # Keep the values alive: once an object is gone, its id may be reused.
        patched_values = {
            id(site.installed): site.installed for site in installed_sites
        }
        replaced = []
        for site in installed_sites:
            if site.can_be_found:
                replaced.append((site.installed, site.original))
            site.restore()
        remaining_copies = []
        for copy in self._rebound_copies:
            if id(copy.new) not in patched_values:
                remaining_copies.append(copy)
            # Skip names that other code has rebound since.
            elif copy.names.get(copy.name) is copy.new:
                copy.names[copy.name] = copy.old
        self._rebound_copies = remaining_copies
        # Also restore copies that other code has made since, unless one value replaces
        # several originals. Skip only our own modules, which own the replacements.
        # Search torch's modules and classes too: some may have been imported since, and
        # torch's compiler keeps `torch.cuda` functions in classes.
        originals_of: dict[int, set[int]] = {}
        for patched, original in replaced:
            originals = originals_of.setdefault(id(patched), set())
            originals.add(id(original))
        unambiguous = []
        for patched, original in replaced:
            if len(originals_of[id(patched)]) == 1:
                unambiguous.append((patched, original))
        rebind(unambiguous, {"megatron_ext"}, in_classes=True)

    # -- calling ---------------------------------------------------------------------------------

    def _dispatch(
        self,
        site: Site,
        wrapped: Call,
        instance: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run one call to a patch point through the patches that are active now.

        Raises:
            UpstreamMismatch: The target is not the one that an acting patch was written for.
        """
        acting = [
            (patch, fn) for patch in site.patches if (fn := patch.acting()) is not None
        ]
        if not acting:
            return wrapped(*args, **kwargs)
        if drift.refuses(site.mismatch):
            raise site.mismatch  # type: ignore[misc]
        if len(acting) > 1:
            acting.sort(key=_place_in_chain)
            _check_replacements(site, [patch for patch, _ in acting])
        for patch, _ in acting:
            self.acted.add(patch.id)
        call = wrapped
        for _, fn in acting[:0:-1]:
            # Chain all patches except the outermost, starting with the innermost. Each
            # step has the target's signature, because `by_name` reads its parameters.
            call = update_wrapper(partial(_step, fn, call, instance), wrapped)
        _, outermost = acting[0]
        return outermost(call, instance, args, kwargs)

    # -- looking ---------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return every patch's state, including for other releases, sorted by feature and id."""
        rows = [self._row(patch) for patch in self]
        return sorted(rows, key=lambda row: (row.feature, row.id, row.releases))

    def _row(self, patch: Patch) -> Row:
        if not patch.is_for(self.release):
            return _idle_row(patch, "other release")
        site = self._sites[patch.target]
        is_loaded = _is_loaded(patch.module)
        would_act = is_loaded and patch.acting() is not None
        state: State = "refused"
        if not self.active:
            state = "off"
        elif not is_loaded:
            state = "pending"
        elif site.is_installed:
            state = "installed"
        elif site.mismatch is None:
            state = "skipped"
        elif drift.is_missing(site.mismatch) and not (patch.required and would_act):
            state = "absent"
        difference = ""
        if site.mismatch is not None:
            difference = f"{site.mismatch.actual}"
        return Row(
            **vars(patch),
            state=state,
            intact=site.intact(),
            active=self.active and would_act and site.is_installed,
            drift=difference,
        )

    def raise_mismatches(self) -> None:
        """Raise an error if active patches were not written for the installed Megatron.

        With `MEGATRON_EXT_DRIFT=warn`, rank 0 logs one line about the differences instead. If the
        release is newer than all known ones but fits all patches in use, rank 0 logs that once.

        Raises:
            UpstreamMismatch: The first mismatch, unless `MEGATRON_EXT_DRIFT` allows it.
            UserError: The variable has an invalid value, even if there is no mismatch.
        """
        drift.policy()
        differences = []
        for site in self._sites.values():
            mismatch = site.mismatch or drift.missing_module(site.target)
            if mismatch is None or not _concerns_an_acting_patch(site, mismatch):
                continue
            if drift.refuses(mismatch):
                raise mismatch
            differences.append(_difference(site, mismatch))
        if not self._has_logged:
            self._has_logged = True
            drift.log(differences, self.release)

    def modules(self) -> list[str]:
        """Return the names of all patched modules, sorted."""
        return sorted({site.first.module for site in self._sites.values()})


def _is_loaded(name: str) -> bool:
    """Return whether a module is fully imported; if not, it gets a post-import hook."""
    module = sys.modules.get(name)
    # A module is already in sys.modules during its import, but incomplete.
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _place_in_chain(patch_and_function: tuple[Patch, Call]) -> tuple[bool, int, str]:
    """Return the key that sorts acting patches from outermost to innermost."""
    patch, _ = patch_and_function
    return patch.kind == "replace", patch.order, patch.id


def _check_replacements(site: Site, patches: Iterable[Patch]) -> None:
    replacements = [patch.id for patch in patches if patch.kind == "replace"]
    if len(replacements) > 1:
        raise PatchConflict(
            f"{site.target} has {len(replacements)} active replacements, "
            f"{', '.join(replacements)}, but at most one is allowed; turn off all but one of these "
            "features"
        )


def _concerns_an_acting_patch(site: Site, mismatch: UpstreamMismatch) -> bool:
    """Return whether a patch that needs the mismatched target would act."""
    is_missing = drift.is_missing(mismatch)
    for patch in site.patches:
        # Skip patches that do not require their target.
        if is_missing and not patch.required:
            continue
        if patch.acting():
            return True
    return False


def _difference(site: Site, mismatch: UpstreamMismatch) -> str:
    """Return how a target differs and whether a user's edits to it still run."""
    difference = f"{mismatch.target} has {mismatch.actual}"
    for patch in site.patches:
        if patch.kind == "replace" and patch.acting():
            return f"{difference} and does not run, because {patch.id} replaces it"
    return difference


def _idle_row(patch: Patch, state: State) -> Row:
    return Row(**vars(patch), state=state, intact=True, active=False, drift="")


def _step(
    fn: Call,
    call: Call,
    instance: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return fn(call, instance, args, kwargs)


REGISTRY = Registry()
"""The patches in this process."""
