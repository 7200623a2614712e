"""Patches as data, and their targets in the running process.

A `Patch` is a row in a table. A `Site` is a target that several patches may share; it holds the
original and current values and can restore the original. Copies of a name that other modules made
with `from x import y` are found by identity. Copies in default arguments, closures, partials and
bound methods cannot be found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import wrapt

from megatron_ext.config import active

if TYPE_CHECKING:
    from megatron_ext.errors import UpstreamMismatch
    from megatron_ext.upstream.releases import Release

Call = Callable[..., Any]
"""Continues the chain of wraps; passed to a patch's `fn`."""
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_BEFORE_ALL: Release = (0, 0)
_AFTER_ALL: Release = (1 << 30, 0)
_Replacement = tuple[Any, Any]
"""An object and its replacement."""

MISSING = object()
"""Marks a missing attribute, because None is a valid value."""

State = Literal[
    "pending", "installed", "skipped", "absent", "refused", "off", "other release"
]
"""A patch's state. `absent` means that the target is missing and no feature in use needs it.
"""


def by_name(call: Call, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return a target's arguments by name, whether passed by position or by name."""
    bound = signature(call).bind(*args, **kwargs)
    return dict(bound.arguments)


def always() -> bool:
    """Return True: the `when` of patches that act whenever the registry is active."""
    return True


@dataclass(frozen=True)
class Patch:
    """One change to one attribute in another package."""

    id: str
    """Unique name, `area.what`. Rows for different releases may share it."""
    target: str
    """`module:attribute.path`; class attributes are allowed."""
    reason: str
    """One sentence: what goes wrong, or is missing, without this patch."""
    fn: Callable[..., Any]
    """wrap, replace: `fn(next, instance, args, kwargs)`, where `next(*args, **kwargs)` continues
    the chain (already bound to `instance` for methods). set: `fn(original)`, called once at
    installation, returns the new value (with `creates`, original is None)."""
    kind: Literal["wrap", "replace", "set"] = "wrap"
    when: Callable[[], bool] = always
    """wrap, replace: evaluated at each call. set: evaluated once, when the module is loaded."""
    of: Callable[[], Any] | None = None
    """wrap, replace: returns the patch's subject, such as the active pipeline, which is passed to
    `fn` as its first argument. If the subject is None, the patch does not act."""
    order: int = 0
    """Position among a target's wraps; lower numbers are further out."""
    feature: str = "core"
    """The feature that the patch belongs to, for listings."""
    creates: bool = False
    """set: the name does not exist upstream (the reason explains why it is needed)."""
    since: Release = _BEFORE_ALL
    """The first minor release that the row applies to, such as `(0, 17)`."""
    until: Release = _AFTER_ALL
    """The first minor release that the row no longer applies to."""
    required: bool = True
    """Whether a missing target is an error if the patch would act. False for conveniences and when
    other checks verify the effect (`megatron_ext/patches/effects.py`)."""

    @property
    def module(self) -> str:
        """The name of the module that defines the target."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        """The attribute's path inside the module."""
        return self.target.partition(":")[2]

    @property
    def releases(self) -> str:
        """The releases that the row applies to, as text; empty if it applies to all."""
        first = "{}.{}".format(*self.since)
        end = "{}.{}".format(*self.until)
        has_first = self.since != _BEFORE_ALL
        has_end = self.until != _AFTER_ALL
        if has_first and has_end:
            return f"{first} and later, before {end}"
        if has_first:
            return f"since {first}"
        if has_end:
            return f"before {end}"
        return ""

    def acting(self) -> Callable[..., Any] | None:
        """Return `fn`, bound to its subject if any, or None if the patch does not act now."""
        if not self.when():
            return None
        if self.of is None:
            return self.fn
        subject = self.of()
        if subject is None:
            return None
        return partial(self.fn, subject)

    def is_for(self, release: Release | None) -> bool:
        """Return whether the row applies to a release.

        If the release is unknown, only rows for all releases apply.
        """
        if release is None:
            return self.since == _BEFORE_ALL and self.until == _AFTER_ALL
        return self.since <= release < self.until


class PatchTable(list[Patch]):
    """The rows for one upstream area, each written as a decorator on its function.

    Args:
        defaults: `Patch` fields shared by all rows that do not override them.
    """

    def __init__(self, **defaults: Any) -> None:
        super().__init__()
        self._defaults = defaults

    def row(
        self,
        name: str,
        target: str,
        reason: str = "",
        **fields: Any,
    ) -> Callable[[_Function], _Function]:
        """Return a decorator that adds a row; its reason defaults to the function's docstring."""

        def add(fn: _Function) -> _Function:
            docstring = fn.__doc__ or ""
            patch_reason = reason or " ".join(docstring.split())
            patch_fields = {**self._defaults, **fields}
            self.append(Patch(name, target, patch_reason, fn, **patch_fields))
            return fn

        return add


class _WhileInForce:
    """True while one of our schedules or a role is active."""

    def __bool__(self) -> bool:
        in_force = active.active()
        return in_force is not None and bool(in_force.pipeline or in_force.job)


class PatchPoint(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A proxy that survives copy, deepcopy and pickle and that compiled code does not bypass."""

    # torch.compile traces through a proxy to the wrapped function, which would skip the
    # patches; this flag makes it call the proxy. The flag is off unless a schedule or
    # role is active, because calling the proxy breaks the graph.
    _torchdynamo_disable = _WhileInForce()
    _torchdynamo_disable_msg = "patched by megatron_ext"

    # Megatron deep-copies configurations that refer to functions and pickles partials;
    # plain wrapt proxies support neither. Copying a patch point returns the point
    # itself, and a point is pickled by name, like the function it wraps.

    def __copy__(self) -> PatchPoint:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchPoint:
        return self

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__wrapped__.__qualname__)


@dataclass(frozen=True, kw_only=True)
class Row(Patch):
    """A patch and its state, as shown by `megatron-ext patches list`."""

    state: State
    intact: bool
    active: bool
    drift: str


@dataclass
class Site:
    """A target: its patches and, once installed, the original and current values."""

    target: str
    patches: list[Patch] = field(default_factory=list)
    parent: Any = None
    attribute: str = ""
    original: Any = MISSING  # result of a lookup on the parent
    defined: Any = MISSING  # value in the parent's dict (a class may inherit one)
    installed: Any = MISSING
    is_shared: bool = False  # the installed object already had another name
    mismatch: UpstreamMismatch | None = None

    @property
    def is_installed(self) -> bool:
        """Whether the patched value is in place."""
        return self.installed is not MISSING

    @property
    def first(self) -> Patch:
        """The site's first patch; a `set` patch is always the only one."""
        return self.patches[0]

    @property
    def spreads(self) -> bool:
        """Whether to also replace copies of the name in other modules."""
        # Skip constants: for example, nearly every module binds None.
        if not (callable(self.original) and callable(self.installed)):
            return False
        # Skip targets that are themselves copies of another module's name: only this
        # copy should change. torch is an exception, because it defines most public
        # names in private modules.
        module = self.first.module
        defined_in = getattr(self.original, "__module__", None) or module
        return defined_in == module or module.partition(".")[0] == "torch"

    @property
    def can_be_found(self) -> bool:
        """Whether identity finds every copy of the patched value: all come from this target."""
        return (
            callable(self.installed)
            and self.original is not MISSING
            and not self.is_shared
        )

    def intact(self) -> bool:
        """Return whether the target is still the installed value, or another proxy around it."""
        if not self.is_installed:
            return True
        # Read the parent's own dict: a lookup on a class would also find inherited attributes.
        current = vars(self.parent).get(self.attribute, MISSING)
        if current is self.installed:
            return True
        if not isinstance(self.installed, PatchPoint):
            return False
        return bool(wrapt.is_wrapped_by(current, self.installed))

    def put(self, value: Any) -> None:
        """Assign the patched value."""
        setattr(self.parent, self.attribute, value)
        self.installed = value

    def restore(self) -> None:
        """Restore the original unless other code has replaced the attribute since."""
        if isinstance(self.installed, PatchPoint):
            wrapt.unwrap_object(
                self.parent, self.attribute, self.installed, missing_ok=True
            )
        elif self.intact():
            if self.defined is MISSING:
                delattr(self.parent, self.attribute)
            else:
                setattr(self.parent, self.attribute, self.defined)
        self.installed = MISSING


# -- copies of a name in other modules -------------------------------------------------------------


# Undo must distinguish a copy of a replacement from an object that already had other
# names. On the host, for example, `torch.cuda.FloatTensor` becomes `torch.FloatTensor`,
# and the latter name must be kept. Undo therefore restores such objects only where this
# module has put them, and all others everywhere.
class Copy(NamedTuple):
    """A name in another module that was rebound because it copied a patched name."""

    names: dict[str, Any]
    name: str
    old: Any
    new: Any


def bound_objects() -> set[int]:
    """Return the ids of all objects that modules in other packages bind to a name."""
    ids = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron_ext":
            continue
        names = getattr(module, "__dict__", {})
        for value in list(names.values()):
            ids.add(id(value))
    return ids


def rebind(
    replacements: Iterable[_Replacement],
    untouched: Container[str],
    *,
    in_classes: bool = False,
) -> list[Copy]:
    """Replace objects wherever a loaded module binds them to a name.

    Args:
        replacements: `(old, new)`; old objects are functions, methods or classes.
        untouched: Packages whose names are left alone.
        in_classes: Whether to also search classes in modules.

    Returns:
        The names that were rebound in modules.
    """
    # Compare by identity: a sweep by name would miss renamed copies and replace
    # unrelated objects with the same name.
    replacement_of: dict[int, _Replacement] = {}
    for old, new in replacements:
        if old is not new:
            replacement_of[id(old)] = old, new
    rebound: list[Copy] = []
    if not replacement_of:
        return rebound
    for module_name, module in list(sys.modules.items()):
        # Any other attribute access could load a lazy module.
        names = getattr(module, "__dict__", None)
        package = module_name.partition(".")[0]
        if not isinstance(names, dict) or package in untouched:
            continue
        for name, value in list(names.items()):
            if id(value) in replacement_of:
                old, new = replacement_of[id(value)]
                rebound.append(Copy(names, name, old, new))
                names[name] = new
            if not in_classes:
                continue
            # Do not use isinstance: it reads every value's `__class__`, which makes
            # some objects emit a warning.
            is_class = issubclass(type(value), type)
            if is_class and value.__module__ == module_name:
                _rebind_in_class(value, replacement_of)
    return rebound


def _rebind_in_class(cls: type, replacement_of: dict[int, _Replacement]) -> None:
    for name, value in list(vars(cls).items()):
        is_static = isinstance(value, staticmethod)
        function = value.__func__ if is_static else value
        if id(function) not in replacement_of:
            continue
        _, new = replacement_of[id(function)]
        setattr(cls, name, staticmethod(new) if is_static else new)
