"""Finds the copies of a name that other modules made with `from x import y`, by identity.

It cannot find default arguments, closures, partials and bound methods.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Copy", "bound_objects", "replace_aliases", "restore_aliases"]

# Never touched when patching: our own modules (they keep originals on purpose), torch's internals
# (they must keep calling the originals) and the library of the proxies.
_UNTOUCHED = frozenset({"megatron_ext", "torch", "wrapt"})

_Table = dict[int, tuple[Any, Any]]


# Undo must distinguish a copy of a replacement from an object that had other names before:
# `torch.cuda.FloatTensor` becomes `torch.FloatTensor` on the host, and that name must stay. So undo
# restores such objects only where this module put them, and all others everywhere.
@dataclass(frozen=True)
class Copy:
    """A name of another module that was rebound because it is a copy of a patched name."""

    names: dict[str, Any]
    name: str
    old: Any
    new: Any

    def restore(self) -> None:
        """Restore the old binding, unless other code has rebound the name since."""
        if self.names.get(self.name) is self.new:
            self.names[self.name] = self.old


def bound_objects() -> set[int]:
    """Return the ids of all objects that other packages' modules bind to a name."""
    return {
        id(value)
        for module, names in _modules()
        if module.partition(".")[0] != "megatron_ext"
        for value in list(names.values())
    }


def replace_aliases(pairs: Iterable[tuple[Any, Any]]) -> list[Copy]:
    """Replace objects by others wherever a loaded module binds them to any name.

    Args:
        pairs: `(old, new)`; old objects are functions, methods or classes.

    Returns:
        The rebound names.
    """
    # By identity: a sweep by name would miss renamed copies and hit other objects of the same name.
    table = _table(pairs)
    spaces = (names for name, names in _modules() if name.partition(".")[0] not in _UNTOUCHED)
    return [copy for names in spaces for copy in _rebind(names, table)] if table else []


def restore_aliases(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Undo `replace_aliases`, including copies of replacements that other code has made since.

    Args:
        pairs: `(replacement, original)`, for replacements that had no name elsewhere before. A
            replacement of several originals is skipped.
    """
    pairs = list(pairs)
    originals: dict[int, set[int]] = defaultdict(set)
    for replacement, original in pairs:
        originals[id(replacement)].add(id(original))
    table = _table(pair for pair in pairs if len(originals[id(pair[0])]) == 1)
    for name, names in _modules() if table else ():
        # Only our own modules, which own the replacements, stay unchanged: torch's may have been
        # imported in between, and its compiler keeps functions of `torch.cuda` in classes.
        if name.partition(".")[0] == "megatron_ext":
            continue
        _rebind(names, table)
        for value in list(names.values()):
            # Not isinstance: it reads the class of instances, and some answer with a warning.
            if issubclass(type(value), type) and value.__module__ == name:
                _rebind_class(value, table)


def _table(pairs: Iterable[tuple[Any, Any]]) -> _Table:
    return {id(old): (old, new) for old, new in pairs if old is not new}


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and namespace of each loaded module; lazy modules stay as they are."""
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            yield name, names


def _rebind(names: dict[str, Any], table: _Table) -> list[Copy]:
    found = [
        Copy(names, name, *table[id(value)])
        for name, value in list(names.items())
        if id(value) in table
    ]
    names.update((copy.name, copy.new) for copy in found)
    return found


def _rebind_class(cls: type, table: _Table) -> None:
    found = []
    for name, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, staticmethod) else value
        if id(plain) in table:
            new = table[id(plain)][1]
            found.append((name, staticmethod(new) if isinstance(value, staticmethod) else new))
    for name, value in found:
        setattr(cls, name, value)
