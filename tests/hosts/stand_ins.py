"""Stands in for packages that Megatron-Bridge imports but a machine without a GPU cannot have.

Trainings with Megatron's own layers (`transformer_impl` local) never call any of this; a name that
is used anyway raises an error.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Anything(type):
    """Metaclass of classes that have every attribute and can be inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)


def _class(name: str) -> Any:
    return _Anything(name, (), {"__init__": _refuse})


def _refuse(self: Any, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"{type(self).__name__} is a stand-in without a GPU")


class _StandIn(ModuleType):
    """A package in which every name and module exists."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"  # too old for every version check

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stand_in = _class(name)
        setattr(self, name, stand_in)
        return stand_in


def install(**more: tuple[str, ...]) -> list[str]:
    """Install stand-ins for missing packages; return their names.

    Args:
        **more: Other packages, and the modules in them.
    """
    for name in _BEFORE:
        import_module(name)
    installed = []
    for name, parts in {**_MODULES, **more}.items():
        if name in sys.modules or find_spec(name) is not None:
            continue
        installed.append(name)
        sys.modules[name] = root = _StandIn(name)
        for part in parts:
            module = root
            for word in part.split("."):
                full = f"{module.__name__}.{word}"
                if full not in sys.modules:
                    sys.modules[full] = _StandIn(full)
                    setattr(module, word, sys.modules[full])
                module = sys.modules[full]
    return installed


_MODULES = {
    "transformer_engine": ("pytorch",),
    "nvidia_resiliency_ext": ("inprocess",),
}
"""Packages and their modules."""

_BEFORE = (
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.full_cuda_graph",
    "megatron.core.rerun_state_machine",
)
"""Modules that check for these packages themselves and work without them."""
