"""Import hooks: locate Megatron's packages and run a callback just before the first import.

Python queries the finders in `sys.meta_path` just before a module executes, so a finder at the
front can run the callback and decide which Megatron is used. `sys.path` is left unchanged.
"""

from __future__ import annotations

import logging
import os
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

_LOG = logging.getLogger(__name__)

_TREE_PACKAGES = {
    "megatron.legacy",
    "megatron.post_training",
    "megatron.rl",
    "megatron.training",
}
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
    """Locates Megatron's packages and its scripts' modules; runs callbacks before imports."""

    def __init__(self, before: dict[str, Callable[[], object]]) -> None:
        self.before = before
        """Maps a package to a callback that runs once, just before the package executes."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a Megatron package's location, or None to defer to Python's finders."""
        # First check that the package exists: code may import an optional package and
        # handle its absence.
        if fullname in self.before and _exists(fullname, path):
            callback = self.before.pop(fullname)
            callback()
        # A full tree on `PYTHONPATH` has its own `megatron.core`, which lacks the compiled dataset
        # helpers.
        if fullname == "megatron.core":
            core = releases.installed_core()
            if core is None:
                return None
            is_first_rank = os.environ.get("RANK", "0") == "0"
            if is_first_rank:
                ignored = upstream.ignored_sources(core)
                if ignored is not None:
                    _LOG.warning("megatron_ext: %s", ignored)
            return _spec_in(core.parent, fullname)
        # `megatron` is a namespace package, so Python merges the wheel's
        # `megatron.core` with these packages from a tree. Since 0.17, the wheel also
        # contains some of these packages, but a tree's scripts need the tree's.
        if fullname in _TREE_PACKAGES:
            tree = upstream.find_tree()
            folder = None if tree is None else tree / "megatron"
            return _spec_in(folder, fullname)
        # Let everything on `sys.path` take precedence: the user may have a module with
        # this name.
        if fullname in _TREE_SCRIPTS and PathFinder.find_spec(fullname) is None:
            return _spec_in(upstream.find_tree(), fullname)
        if fullname == _TRITON_KERNELS and _lacks_triton():
            stand_in = Path(devices.__file__).with_name("no_triton.py")
            return spec_from_file_location(fullname, stand_in)
        return None


def _exists(package: str, path: Sequence[str] | None) -> bool:
    if package == "megatron.core":
        return True
    return PathFinder.find_spec(package, path) is not None


def _spec_in(folder: Path | None, fullname: str) -> ModuleSpec | None:
    if folder is None:
        return None
    return PathFinder.find_spec(fullname, [str(folder)])


def _lacks_triton() -> bool:
    """Return whether Triton is missing but this Megatron imports Triton kernels regardless."""
    # torch's CPU builds and some MUSA builds do not include Triton, but
    # `megatron.training` in 0.16 always imports these kernels. The replacement module
    # raises when they are called.
    return find_spec("triton") is None and releases.installed_release() == (0, 16)


def _installed_finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def install(before_core: Callable[[], object]) -> None:
    """Hook Megatron's import. Idempotent.

    The callback runs once, just before `megatron.core` first executes, or immediately if
    `megatron.core` is already imported.
    """
    if _installed_finders():
        return
    # wrapt's hooks fire after a module has executed, which is too late: `megatron.core`
    # copies names from `torch.cuda` at import time, so the device's redirects must
    # already be in place. The finder must come first, or Python's own would locate an
    # installed Megatron.
    sys.meta_path.insert(0, _Finder({"megatron.core": before_core}))
    REGISTRY.undo.callback(_remove)
    if "megatron.core" in sys.modules:
        before_core()


def _remove() -> None:
    for finder in _installed_finders():
        sys.meta_path.remove(finder)


def before(package: str, callback: Callable[[], None]) -> None:
    """Call a callback once, just before a package inside `megatron` first executes.

    If the callback raises an exception, the import fails.
    """
    for finder in _installed_finders():
        finder.before[package] = callback
