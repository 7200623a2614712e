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
        # Code may look for the others where they are not, to see whether they exist.
        if fullname in self.before and (
            fullname == "megatron.core" or PathFinder.find_spec(fullname, path) is not None
        ):
            self.before.pop(fullname)()
        # A full tree on `PYTHONPATH` would bring its own, without the compiled dataset helpers.
        if fullname == "megatron.core":
            core = releases.installed_core()
            return PathFinder.find_spec(fullname, [str(core.parent)]) if core else None
        # `megatron` is a namespace package, so `megatron.core` of the wheel and these of a tree
        # merge. Since 0.17 the wheel has some of them too; a tree's own scripts get the tree's.
        if fullname in _TREE_PACKAGES:
            tree = upstream.find_tree()
            return PathFinder.find_spec(fullname, [str(tree / "megatron")]) if tree else None
        # After all entries of `sys.path`: a script of the user's with such a name precedes them.
        if fullname in _TREE_SCRIPTS and PathFinder.find_spec(fullname) is None:
            tree = upstream.find_tree()
            return PathFinder.find_spec(fullname, [str(tree)]) if tree else None
        # `megatron.training` always imports these kernels, in 0.16 those of Triton, which CPU and
        # some MUSA builds of torch lack: they get a stand-in that raises when called.
        if (
            fullname == _TRITON_KERNELS
            and find_spec("triton") is None
            and releases.installed_release() == (0, 16)
        ):
            return spec_from_file_location(
                fullname, Path(devices.__file__).with_name("no_triton.py")
            )
        return None


def _installed() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def install(before_core: Callable[[], object]) -> None:
    """Hook the import of Megatron. Idempotent.

    The callback is called once, just before `megatron.core` first executes; now if it already has.
    """
    if _installed():
        return
    # Not wrapt's hooks, which fire after a module has executed: `megatron.core` copies names of
    # `torch.cuda` at import, so the redirects of the device must be in place before. And at the
    # front, or an installed Megatron would be found first.
    sys.meta_path.insert(0, _Finder({"megatron.core": before_core}))
    REGISTRY.undo.callback(_remove)
    if "megatron.core" in sys.modules:
        before_core()


def _remove() -> None:
    for finder in _installed():
        sys.meta_path.remove(finder)


def before(package: str, callback: Callable[[], None]) -> None:
    """Have a callback called once, just before a package below `megatron` first executes.

    Exceptions of the callback end the import.
    """
    for finder in _installed():
        finder.before[package] = callback
