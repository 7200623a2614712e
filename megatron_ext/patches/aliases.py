"""Finds the copies of a name that other modules made with `from x import y`, by identity.

A sweep by name would miss renamed copies and hit strangers that share the name, so objects are
compared. What cannot be found this way: default arguments, closures, partials, bound methods.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["KEEP_OURS", "replace_aliases"]

KEEP_OURS = frozenset({"megatron_ext"})
"""What to leave alone when undoing: modules of torch that were imported meanwhile may have copied a
replacement, so they are mended too."""

# Never touched: ourselves (we keep originals on purpose), torch's own internals (they must keep
# calling what they were written for) and the proxies' library.
_UNTOUCHED = frozenset({"megatron_ext", "torch", "wrapt"})


def replace_aliases(
    pairs: Iterable[tuple[Any, Any]], untouched: frozenset[str] = _UNTOUCHED
) -> int:
    """Replace objects by others wherever a loaded module binds them to any name.

    Args:
        pairs: `(old, new)`, old objects being functions, methods or classes.
        untouched: Top-level packages to leave alone.

    Returns:
        How many names were rebound.
    """
    table = {id(old): (old, new) for old, new in pairs if old is not new}
    if not table:
        return 0
    count = 0
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] in untouched:
            continue
        # vars, not getattr: lazy modules must not be triggered.
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            found = table.get(id(value))
            if found is not None and value is found[0]:
                names[name] = found[1]
                count += 1
    return count
