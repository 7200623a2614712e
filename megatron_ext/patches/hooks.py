"""Import hooks: locate Megatron's packages, and run a callback just before the first one.

A finder at the front of `sys.meta_path`, which Python queries just before a module executes, runs
the callback and decides which Megatron is used. `sys.path` stays as the user set it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from megatron_ext import devices
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream

_TREE_PACKAGES = {f"megatron.{name}" for name in ("legacy", "post_training", "rl", "training")}
_TREE_SCRIPTS = {
    "gpt_builders",
    "hybrid_builders",
    "mamba_builders",
    "model_provider",
    "pretrain_bert",
    "pretrain_gpt",
}
_TRITON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


class _Finder(MetaPathFinder):
    """Places Megatron's packages and the modules of its scripts; runs callbacks before packages."""

    def __init__(self, before: dict[str, Callable[[], object]]) -> None:
        self.before = before
        """Callbacks by package; each is called once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the location of one of Megatron's packages; None defers to Python."""
        # Code may look for an optional package, to see whether there is one: no callback then.
        if fullname in self.before and _exists(fullname, path):
            self.before.pop(fullname)()
        # A full tree on `PYTHONPATH` would bring its own, without the compiled dataset helpers.
        if fullname == "megatron.core":
            core = releases.installed_core()
            return _spec_in(core and core.parent, fullname)
        # `megatron` is a namespace package, so `megatron.core` of the wheel and these of a tree
        # merge. Since 0.17 the wheel has some of them too; a tree's own scripts get the tree's.
        if fullname in _TREE_PACKAGES:
            tree = upstream.find_tree()
            return _spec_in(tree and tree / "megatron", fullname)
        # After all entries of `sys.path`: a script of the user's with such a name precedes them.
        if fullname in _TREE_SCRIPTS and PathFinder.find_spec(fullname) is None:
            return _spec_in(upstream.find_tree(), fullname)
        if fullname == _TRITON_KERNELS and _lacks_triton():
            stand_in = Path(devices.__file__).with_name("no_triton.py")
            return spec_from_file_location(fullname, stand_in)
        return None


def _exists(package: str, path: Sequence[str] | None) -> bool:
    return package == "megatron.core" or PathFinder.find_spec(package, path) is not None


def _spec_in(folder: Path | None, fullname: str) -> ModuleSpec | None:
    return None if folder is None else PathFinder.find_spec(fullname, [str(folder)])


def _lacks_triton() -> bool:
    """Return whether Megatron always imports kernels of Triton, but this machine has no Triton."""
    # CPU and some MUSA builds of torch come without it, and 0.16's `megatron.training` imports its
    # kernels whatever they are for: they get a stand-in that raises when called.
    return find_spec("triton") is None and releases.installed_release() == (0, 16)


def _installed_finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def install(before_core: Callable[[], object]) -> None:
    """Hook the import of Megatron. Idempotent.

    The callback is called once, just before `megatron.core` first executes; now if it already has.
    """
    if _installed_finders():
        return
    # Not wrapt's hooks, which fire after a module has executed: `megatron.core` copies names of
    # `torch.cuda` at import, so the redirects of the device must be in place before. And at the
    # front, or an installed Megatron would be found first.
    sys.meta_path.insert(0, _Finder({"megatron.core": before_core}))
    REGISTRY.undo.callback(_remove)
    if "megatron.core" in sys.modules:
        before_core()


def _remove() -> None:
    for finder in _installed_finders():
        sys.meta_path.remove(finder)


def before(package: str, callback: Callable[[], None]) -> None:
    """Have a callback called once, just before a package below `megatron` first executes.

    Exceptions of the callback end the import.
    """
    for finder in _installed_finders():
        finder.before[package] = callback
