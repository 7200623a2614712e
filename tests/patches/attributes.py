"""Captures the attributes of torch and Megatron in this process, to compare before and after."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# Changes that torch makes itself when more of it is imported.
_OWN_CHANGES_BECAUSE = {
    "torch.distributions.distribution:Distribution._validate_args": "torch.compile ends the checks",
    "torch._C._distributed:Placement": "torch.distributed.tensor puts another class there",
    "torch._weights_only_unpickler:_marked_safe_globals_set": "a set that is made anew to grow",
    "torch.distributed.device_mesh:_distributed_opaque_types_registered": "a note that it was done",
}


_OWN_CHANGES = tuple(_OWN_CHANGES_BECAUSE)


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if name.partition(".")[0] in {"megatron", "torch"} and isinstance(names, dict):
            yield name, names


def held() -> dict[str, Any]:
    """Return every attribute of all loaded modules and their classes, and contents of lists."""
    attributes: dict[str, Any] = {}
    for module, names in _modules():
        for name, value in list(names.items()):
            place = f"{module}:{name}"
            attributes[place] = value
            if issubclass(type(value), type) and value.__module__ == module:
                for key, attribute in list(vars(value).items()):
                    attributes[f"{place}.{key}"] = attribute
            elif type(value) in {list, tuple}:
                for index, entry in enumerate(value):
                    attributes[f"{place}[{index}]"] = entry
    return {
        place: value
        for place, value in attributes.items()
        if not place.startswith(_OWN_CHANGES)
    }


def different(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the attributes that are different objects, or that existing modules have gained.

    Additions by imports are left out: submodules, and entries in lists where torch records them.
    """
    missing = object()
    changed = [
        place
        for place, value in before.items()
        if after.get(place, missing) is not value
    ]
    modules = {place.partition(":")[0] for place in before}
    gained = [
        place
        for place in after.keys() - before.keys()
        if place.partition(":")[0] in modules
        and not place.endswith("]")
        and not isinstance(after[place], ModuleType)
    ]
    return sorted(changed + gained)


def described() -> dict[str, str]:
    """Return a description of every attribute that is the same in another process."""
    return {
        place: _words(value)
        for place, value in held().items()
        if not place.endswith("]")
    }


def _words(value: Any) -> str:
    if value is None or type(value) is bool:
        return repr(value)
    kind = type(value)
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{kind.__qualname__} {value.__module__}.{value.__qualname__}"
