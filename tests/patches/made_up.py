"""A made-up upstream package, and patches on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_ext.patches.registry import Patch

SOURCE = '''
LIMIT = 3


def add(a, b=1):
    """Add."""
    return a + b


class Base:
    def inherited(self):
        return "inherited"


class Box(Base):
    def __init__(self, value):
        self.value = value

    def get(self, plus=0):
        return self.value + plus

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def make(cls, value):
        return cls(value)
'''


def load(name: str) -> ModuleType:
    return importlib.import_module(f"fake_upstream.{name}")


def tag(label: str) -> Callable[..., Any]:
    def fn(call: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return (label, call(*args, **kwargs))

    return fn


def patch(target: str, label: str = "x", **options: Any) -> Patch:
    options.setdefault("fn", tag(label))
    return Patch(
        id=label, target=f"fake_upstream.core:{target}", reason="a test", **options
    )
