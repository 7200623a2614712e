"""Import hooks: where Megatron's packages come from, and what has to happen just before the first.

wrapt's hooks fire *after* a module was executed. The device redirect must be in place *before*
`megatron.core` is, because it copies names of `torch.cuda` while it is imported. A finder at the
front of `sys.meta_path` is asked for a module just before its execution: the right moment.

The same finder settles which Megatron is used. `megatron` is a namespace package, so
`megatron.core` of the installed wheel and `megatron.training` of a source tree merge (from 0.17 on
the wheel has one too; a tree's own scripts get their own). A full tree
on `PYTHONPATH` would also bring its own `megatron.core`, without the compiled dataset helpers; the
finder takes `megatron.core` from the wheel where there is one. `sys.path` stays as the user set it.

Last, `megatron.training` imports one module of Triton kernels, used only by
`--batch-invariant-mode`, unconditionally. CPU and some MUSA builds of torch come without Triton;
there the finder serves a stand-in (`compat/no_triton.py`), which has the same functions and says
what they need when they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType

from megatron_ext import compat, releases, upstream

__all__ = ["install", "remove"]

_TREE_PACKAGES = frozenset(
    f"megatron.{name}" for name in ("legacy", "post_training", "rl", "training")
)
_TREE_SCRIPTS = frozenset(
    {
        "gpt_builders",
        "hybrid_builders",
        "mamba_builders",
        "model_provider",
        "pretrain_bert",
        "pretrain_gpt",
    }
)
_TRITON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


class _MegatronFinder(MetaPathFinder):
    """Places `megatron.core` and `megatron.training`; runs a callback before the former."""

    def __init__(self, before_core: Callable[[], None]) -> None:
        self._before_core = before_core
        self._armed = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where one of Megatron's packages is; None leaves the others to Python."""
        if fullname == "megatron.core":
            if not self._armed:
                self._armed = True
                self._before_core()
            core = releases.installed_core()
            return PathFinder.find_spec(fullname, [str(core.parent)]) if core else None
        if fullname in _TREE_PACKAGES:
            tree = upstream.find_tree()
            return PathFinder.find_spec(fullname, [str(tree / "megatron")]) if tree else None
        if fullname == _TRITON_KERNELS and find_spec("triton") is None:
            return spec_from_file_location(fullname, compat.batch_invariant_stand_in())
        return None


class _ScriptFinder(MetaPathFinder):
    """Finds the modules beside upstream's scripts, after everything on `sys.path` was tried."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where one of upstream's top-level modules is, or None."""
        if fullname not in _TREE_SCRIPTS:
            return None
        tree = upstream.find_tree()
        return PathFinder.find_spec(fullname, [str(tree)]) if tree else None


def _installed() -> list[MetaPathFinder]:
    """Return our finders."""
    return [f for f in sys.meta_path if isinstance(f, _MegatronFinder | _ScriptFinder)]


def install(before_core: Callable[[], None]) -> None:
    """Hook the import of Megatron. Idempotent.

    Args:
        before_core: Called once, just before `megatron.core` is first executed; at once where that
            has happened already.
    """
    if _installed():
        return
    first, last = _MegatronFinder(before_core), _ScriptFinder()
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    if "megatron.core" in sys.modules:
        before_core()


def remove() -> None:
    """Take the finders out again; modules already imported stay where they came from."""
    for finder in _installed():
        sys.meta_path.remove(finder)
