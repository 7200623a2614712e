"""Finds the copies of a name that other modules made with `from x import y`, by identity.

A sweep by name would miss renamed copies and hit strangers that share the name, so objects are
compared. What cannot be found this way: default arguments, closures, partials, bound methods.

Undoing has to tell a copy of a replacement from an object that had names of its own before:
`torch.cuda.FloatTensor` becomes `torch.FloatTensor` on the host, and that name must stay. So such
objects are put back only where this module put them (`Copy`), all others wherever they are found.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Copy", "bound_objects", "replace_aliases", "restore_aliases"]

# Never touched when patching: ourselves (we keep originals on purpose), torch's own internals (they
# must keep calling what they were written for) and the proxies' library.
_UNTOUCHED = frozenset({"megatron_ext", "torch", "wrapt"})

_Table = dict[int, tuple[Any, Any]]


@dataclass(frozen=True)
class Copy:
    """A name of another module that was rebound with the name that it is a copy of."""

    names: dict[str, Any]
    name: str
    old: Any
    new: Any

    def restore(self) -> None:
        """Bind the name to what it was, unless somebody else has rebound it since."""
        if self.names.get(self.name) is self.new:
            self.names[self.name] = self.old


def bound_objects() -> set[int]:
    """Return the ids of all objects that modules of others bind to a name."""
    return {
        id(value)
        for module, names in _modules()
        if module.partition(".")[0] != "megatron_ext"
        for value in list(names.values())
    }


def replace_aliases(pairs: Iterable[tuple[Any, Any]]) -> list[Copy]:
    """Replace objects by others wherever a loaded module binds them to any name.

    Args:
        pairs: `(old, new)`, old objects being functions, methods or classes.

    Returns:
        The names that were rebound.
    """
    table = _table(pairs)
    spaces = (names for name, names in _modules() if name.partition(".")[0] not in _UNTOUCHED)
    return [copy for names in spaces for copy in _rebind(names, table)] if table else []


def restore_aliases(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Undo `replace_aliases`, also where others have copied a replacement meanwhile.

    That includes modules of torch that were imported in between, and attributes of their classes
    (torch's compiler keeps functions of `torch.cuda` in classes). Only our own modules are left
    alone: the replacements are theirs.

    Args:
        pairs: `(replacement, original)`; replacements that nobody else had a name for. One that
            stands for several originals is left alone.
    """
    table = _table(_unambiguous(list(pairs)))
    for name, names in _modules() if table else ():
        if name.partition(".")[0] == "megatron_ext":
            continue
        _rebind(names, table)
        for value in list(names.values()):
            # Not isinstance: it asks instances for their class, and some answer with a warning.
            if issubclass(type(value), type) and value.__module__ == name:
                _rebind_class(value, table)


def _table(pairs: Iterable[tuple[Any, Any]]) -> _Table:
    return {id(old): (old, new) for old, new in pairs if old is not new}


def _unambiguous(pairs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    meanings: dict[int, set[int]] = defaultdict(set)
    for old, new in pairs:
        meanings[id(old)].add(id(new))
    return (pair for pair in pairs if len(meanings[id(pair[0])]) == 1)


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and namespace of each loaded module; lazy modules are not triggered."""
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
