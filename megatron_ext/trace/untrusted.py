"""Takes values out of text that anybody may have written: what has the right type and size.

Nothing here raises, and nothing read is ever executed.
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard

__all__ = ["MAX_NUMBER", "MAX_TEXT", "decode", "is_attributes", "is_count"]

MAX_NUMBER = 1 << 62
MAX_TEXT = 200
_MAX_ATTRIBUTES = 12


def decode(text: str) -> Any:
    """Return what a JSON text says, None if it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_attributes(attributes: dict[str, Any]) -> bool:
    """Tell whether attributes are few, and numbers or short texts."""
    if len(attributes) > _MAX_ATTRIBUTES:
        return False
    for name, value in attributes.items():
        kind = type(value)
        if len(name) > MAX_TEXT or (kind is not int and kind is not str):
            return False
        if len(value) > MAX_TEXT if kind is str else abs(value) >= MAX_NUMBER:
            return False
    return True


def is_count(value: Any) -> TypeGuard[int]:
    """Tell whether a value is a number from 0 on that nanoseconds and bytes stay below."""
    return type(value) is int and 0 <= value < MAX_NUMBER
