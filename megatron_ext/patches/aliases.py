"""Finds the copies of a name that other modules made with `from x import y`, by identity.

A sweep by name would miss renamed copies and hit strangers that share the name, so objects are
compared. What cannot be found this way: default arguments, closures, partials, bound methods.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["replace_aliases", "restore_aliases"]

# Never touched when patching: ourselves (we keep originals on purpose), torch's own internals (they
# must keep calling what they were written for) and the proxies' library.
_UNTOUCHED = frozenset({"megatron_ext", "torch", "wrapt"})

_Table = dict[int, tuple[Any, Any]]


def replace_aliases(pairs: Iterable[tuple[Any, Any]]) -> int:
    """Replace objects by others wherever a loaded module binds them to any name.

    Args:
        pairs: `(old, new)`, old objects being functions, methods or classes.

    Returns:
        How many names were rebound.
    """
    table = _table(pairs)
    spaces = (names for name, names in _modules() if name.partition(".")[0] not in _UNTOUCHED)
    return sum(_rebind(names, table) for names in spaces) if table else 0


def restore_aliases(pairs: Iterable[tuple[Any, Any]]) -> int:
    """Undo `replace_aliases`, also where others have copied a replacement meanwhile.

    That includes modules of torch that were imported in between, and attributes of their classes
    (torch's compiler keeps functions of `torch.cuda` in classes). Only our own modules are left
    alone: the replacements are theirs.

    Args:
        pairs: `(replacement, original)`.

    Returns:
        How many names were rebound.
    """
    table = _table(pairs)
    count = 0
    for name, names in _modules() if table else ():
        if name.partition(".")[0] == "megatron_ext":
            continue
        count += _rebind(names, table)
        for value in list(names.values()):
            # Not isinstance: it asks instances for their class, and some answer with a warning.
            if issubclass(type(value), type) and value.__module__ == name:
                count += _rebind_class(value, table)
    return count


def _table(pairs: Iterable[tuple[Any, Any]]) -> _Table:
    return {id(old): (old, new) for old, new in pairs if old is not new}


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and namespace of each loaded module; lazy modules are not triggered."""
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            yield name, names


def _rebind(names: dict[str, Any], table: _Table) -> int:
    found = [(name, table[id(value)][1]) for name, value in names.items() if id(value) in table]
    names.update(found)
    return len(found)


def _rebind_class(cls: type, table: _Table) -> int:
    found = []
    for name, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, staticmethod) else value
        if id(plain) in table:
            new = table[id(plain)][1]
            found.append((name, staticmethod(new) if isinstance(value, staticmethod) else new))
    for name, value in found:
        setattr(cls, name, value)
    return len(found)
